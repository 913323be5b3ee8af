"""Faults planted in decision code, each a patch of one place: what a tired colleague might write and a checker must catch.

`seeds` are searched in order; the first shows it at the time of writing, the others are there for when draws change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from orchestrator.detection.waitfor import Culprits
from orchestrator.domain.events import Contact
from orchestrator.domain.faults import FaultRequested
from orchestrator.domain.generation import Settlement
from orchestrator.domain.ids import Generation
from orchestrator.domain.state import Reforming
from orchestrator.recovery.restore import cold_restore
from orchestrator.sim.run import Verdict
from orchestrator.sim.store import SimStore
from orchestrator.supervisor import (
    arbitrating,
    charging,
    faulting,
    forming,
    hearing,
    keeping,
    kernel,
    losing,
    reforming,
    reporting,
    settling,
    sparing,
    stalling,
)
from orchestrator.supervisor.cordons import Cordons
from orchestrator.supervisor.draft import Draft
from orchestrator.supervisor.training import record_step
from orchestrator.supervisor.ward import Ward

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    plant: Callable[[Patch], None]
    verdict: Verdict
    words: str = ""
    """Of what is said about it."""
    seeds: Iterable[int] = range(40)


def rolls_back_for_nothing(patch: Patch) -> None:
    patch.setattr(forming, "choose_restore", lambda *, checkpoint, **_: cold_restore(checkpoint))


def gives_devices_away_twice(patch: Patch) -> None:
    for module in (kernel, arbitrating):
        patch.setattr(module, "claimed", lambda record: frozenset())


def records_a_step_again(patch: Patch) -> None:
    def steps_passed(draft: Any, said: Any) -> None:
        for answer, at in zip(said.answers, said.at, strict=True):
            if answer.step >= draft.record.committed:
                record_step(draft, said.generation, answer, at)

    patch.setattr(hearing, "steps_passed", steps_passed)


def never_finishes(patch: Patch) -> None:
    patch.setattr(kernel, "finish_if_done", lambda draft: None)


def raises(patch: Patch) -> None:
    patch.setattr(hearing, "rank_ready", lambda *_: 1 / 0)


def plans_on_quarantined_devices(patch: Patch) -> None:
    patch.setattr(Ward, "out", frozenset())


def plans_where_a_node_drains(patch: Patch) -> None:
    patch.setattr(Cordons, "closed_to", lambda self, present: frozenset())
    patch.setattr(Cordons, "draining", frozenset())


def forgets_what_survivors_saw_pass(patch: Patch) -> None:
    """Settles at what is recorded, whatever was reported."""

    def settle(generation: Any, committed: Any, last_answer: Any, reports: Any, doubted: Any) -> Settlement:
        held = [(d, r.held.generation) for d, r in sorted(reports.items()) if r.held and r.held.step == committed]
        return Settlement(generation=generation, step=committed, answer=last_answer, holders=tuple(held))

    patch.setattr(settling, "settle", settle)


def settles_twice(patch: Patch) -> None:
    """Acts before everybody has reported, and settles again when the others have."""
    ask = settling.try_settle

    def try_settle(draft: Draft) -> None:
        state = draft.state
        if isinstance(state, Reforming) and state.closing.settlement is None and state.closing.reports:
            draft.become(replace(state, closing=replace(state.closing, awaited=frozenset())))
        ask(draft)

    for module in (reforming, losing, reporting):
        patch.setattr(module, "try_settle", try_settle)


def uses_a_generation_again(patch: Patch) -> None:
    patch.setattr(Draft, "next_generation", lambda self: Generation(max(self.record.generation, 1)))


def commits_under_an_old_term(patch: Patch) -> None:
    commit = SimStore.commit

    def unfenced(self: SimStore, term: Any, what: Any, confirmed: int) -> bool:
        newest, self.term = self.term, term
        try:
            return commit(self, term, what, confirmed)
        finally:
            self.term = newest

    patch.setattr(SimStore, "commit", unfenced)


def charges_what_was_asked_for(patch: Patch) -> None:
    patch.setattr(charging, "NEVER_CHARGED", frozenset())


def takes_silence_for_death(patch: Patch) -> None:
    heard = hearing.host_unheard
    patch.setattr(kernel, "host_unheard", lambda draft, lost: heard(draft, replace(lost, contact=Contact.GONE)))


def commits_checkpoints_before_the_step(patch: Patch) -> None:
    """Off by one: a part of the devices is enough."""

    def ready(draft: Draft) -> None:
        at_it = forming.at_work(draft)
        for step, shards in sorted(draft.record.saving.items()) if at_it else ():
            if at_it and len(shards) >= at_it[1].world_size - 1 and shards[0].kind == "base":
                keeping._commit(draft, at_it[0], step, shards)

    patch.setattr(kernel, "commit_ready_checkpoints", ready)


def takes_spares_that_train(patch: Patch) -> None:
    found = sparing._candidates

    def candidates(draft: Draft, plan: Any, nodes: Any) -> Any:
        return [nodes[node] for node in plan.nodes if node in nodes] or found(draft, plan, nodes)

    patch.setattr(sparing, "_candidates", candidates)


def keeps_quiet_about_risk(patch: Patch) -> None:
    patch.setattr(Draft, "risk", lambda self, why: None)


def forgets_a_rollback(patch: Patch) -> None:
    say = Draft.say

    def quiet(self: Draft, kind: str, message: str, **data: object) -> None:
        if kind != "rolled_back":
            say(self, kind, message, **data)

    patch.setattr(Draft, "say", quiet)


def loses_the_time_of_a_phase(patch: Patch) -> None:
    update = Draft.update_incident

    def forgetful(self: Draft, *, phases: Any = None, **changes: Any) -> None:
        update(self, phases={**phases, "first_step": 0.0} if phases and "first_step" in phases else phases, **changes)

    patch.setattr(Draft, "update_incident", forgetful)


def forgets_what_it_declined(patch: Patch) -> None:
    """Then it is offered the same again, by turns with another job."""
    patch.setattr(Draft, "everything", property(lambda self: frozenset()))


def kills_a_node_without_asking_other_jobs(patch: Patch) -> None:
    found = faulting.matching

    def matching(draft: Draft, asked: FaultRequested) -> Any:
        return found(draft, asked) if asked.job in (None, draft.record.id) else []

    patch.setattr(faulting, "matching", matching)


def kills_those_who_wait(patch: Patch) -> None:
    found = stalling.diagnose

    def diagnose(ranks: Any, generation: Generation, sights: Any, silent: Any) -> Any:
        told = found(ranks, generation, sights, silent)
        waiting = tuple(device for device, sight in sights.items() if sight.in_wait and not sight.is_guilty)
        return replace(told, devices=waiting) if isinstance(told, Culprits) and waiting else told

    patch.setattr(stalling, "diagnose", diagnose)


def leaves_newcomers_unasked(patch: Patch) -> None:
    patch.setattr(reforming, "_caught_up", lambda draft: frozenset())


SAFETY, LIVENESS, CRASH = Verdict.SAFETY, Verdict.LIVENESS, Verdict.CRASH
ALL = (
    Planted(plant=rolls_back_for_nothing, verdict=SAFETY, seeds=(1, *range(40))),
    Planted(plant=gives_devices_away_twice, verdict=SAFETY, seeds=(1, *range(40))),
    Planted(plant=records_a_step_again, verdict=SAFETY, words="is recorded after step"),
    Planted(plant=never_finishes, verdict=LIVENESS),
    Planted(plant=raises, verdict=CRASH),
    Planted(plant=plans_on_quarantined_devices, verdict=SAFETY, words="kept out", seeds=(22, *range(40))),
    Planted(plant=plans_where_a_node_drains, verdict=SAFETY, words="drains", seeds=(20, *range(40))),
    Planted(plant=forgets_what_survivors_saw_pass, verdict=SAFETY),
    Planted(plant=settles_twice, verdict=SAFETY),
    Planted(plant=uses_a_generation_again, verdict=SAFETY),
    Planted(plant=commits_under_an_old_term, verdict=SAFETY, words="commits after term", seeds=(20, *range(40))),
    Planted(plant=charges_what_was_asked_for, verdict=SAFETY, words="nobody's failure"),
    Planted(plant=takes_silence_for_death, verdict=SAFETY, seeds=(12, *range(40))),
    Planted(plant=commits_checkpoints_before_the_step, verdict=SAFETY),
    Planted(plant=takes_spares_that_train, verdict=SAFETY),
    Planted(plant=keeps_quiet_about_risk, verdict=SAFETY, words="says of its risk"),
    Planted(plant=forgets_a_rollback, verdict=SAFETY, words="steps counted", seeds=(20, *range(40))),
    Planted(plant=loses_the_time_of_a_phase, verdict=SAFETY, words="its phases", seeds=(2, *range(40))),
    Planted(plant=forgets_what_it_declined, verdict=SAFETY, words="asks for a plan on", seeds=(421, 33, *range(40))),
    Planted(
        plant=kills_those_who_wait, verdict=SAFETY, words="never did anything but what it should", seeds=(34, *range(40))
    ),
    Planted(plant=leaves_newcomers_unasked, verdict=SAFETY, words="is rolled back", seeds=(302660,)),
    Planted(plant=kills_a_node_without_asking_other_jobs, verdict=SAFETY, words="rolled steps back", seeds=(1708,)),
)


def caught(one: Planted, patch: Patch, run: Callable[[int], Any]) -> tuple[int, Any] | None:
    """The first seed that shows it, and what came of that."""
    one.plant(patch)
    for seed in one.seeds:
        outcome = run(seed)
        if outcome.verdict is not Verdict.PASSED:
            return seed, outcome
    return None
