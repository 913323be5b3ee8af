"""A job shrinks onto fewer devices and a donor is killed in the middle of its transfer: the rest goes on from there."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from test_trainer import PROGRAM, SPEC, TP2_PP2_DP2, a_plan

from orchestrator.domain.generation import Answer, RankReport
from orchestrator.domain.ids import Device, Generation, JobId, Step
from orchestrator.domain.layout import partners
from orchestrator.domain.origin import FromMemory, FromSeed
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Interval
from orchestrator.domain.requests import FormGeneration
from orchestrator.recovery.restore import RestorePlan, choose_restore
from orchestrator.recovery.settle import settle
from worker.checkpoint.handover import NoSnapshots
from worker.data.sources import load
from worker.donation import Donation
from worker.loop import Trainer
from worker.progress import Unwatched
from worker.reference import run
from worker.session import Session
from worker.state import relayout

pytestmark = pytest.mark.timeout(300)
torch.set_num_threads(1)

SMALLER = a_plan(([0, 3, 6], [0, 1, 2, 3]), tp=2, nodes="ab")
JOB = JobId("job")
MESSAGE = 256
"""Elements: a small model in many messages."""


class Ranks:
    """A process per device, as a host would have; the test is their supervisor."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        context = multiprocessing.get_context("fork")
        listeners = {device: socket.create_server(("127.0.0.1", 0), backlog=64) for device in devices}
        self.addresses = {device: f"127.0.0.1:{s.getsockname()[1]}" for device, s in listeners.items()}
        self.ends: dict[Device, Connection] = {}
        self.processes: dict[Device, Any] = {}
        self._context, self._listeners = context, listeners
        self._tokens = load(SPEC.data)
        self._voting = context.Semaphore(0)
        """Raised by whoever enters a vote."""
        for device in devices:
            self.start(device)

    def start(self, device: Device) -> None:
        self.ends[device], there = self._context.Pipe()
        args = (device, self._listeners[device], there, self._tokens, self._voting)
        self.processes[device] = self._context.Process(target=_rank, args=args, daemon=True)
        self.processes[device].start()
        there.close()

    def form(
        self, form: FormGeneration, last: int, doomed: Mapping[Device, int] | None = None
    ) -> dict[Device, tuple[list[Answer], RankReport]]:
        """What members and donors say afterwards. Nothing from the doomed, which die of SIGKILL: a donor when so many of
        its messages have left, a member when it has everything and the others may lack something for all it knows."""
        doomed = doomed or {}
        while self._voting.acquire(block=False):
            pass  # votes of the generation before
        for device in self.living & {*form.plan.devices, *form.donors}:
            self.ends[device].send((form, last, doomed.get(device)))
        said = {}
        for device in sorted(self.living & {*form.plan.devices, *form.donors}):
            assert self.ends[device].poll(100), f"{device} did not answer"
            try:
                said[device] = self.ends[device].recv()
            except EOFError:
                self.processes[device].join(10)
                assert device in doomed and self.processes[device].exitcode == -signal.SIGKILL
        return said

    def kill(self, device: Device) -> None:
        self.processes[device].kill()
        self.processes[device].join(10)

    @property
    def living(self) -> set[Device]:
        return {device for device, process in self.processes.items() if process.is_alive()}


@contextmanager
def ranks(devices: tuple[Device, ...]) -> Iterator[Ranks]:
    made = Ranks(devices)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.join(10)
        for listener in made._listeners.values():
            listener.close()


def _rank(me: Device, listener: socket.socket, end: Connection, tokens: torch.Tensor, voting: Any) -> None:
    gc.freeze()
    relayout.MESSAGE = MESSAGE
    profile = PROGRAM.describe(SPEC)
    trainer = Trainer(SPEC, profile, PROGRAM, tokens, me, Unwatched(), NoSnapshots())
    session: Session | Donation | None = None
    while True:
        form, last, dies_after = end.recv()
        if session is not None:
            session.close()
        common: dict[str, Any] = {
            "plan": form.plan,
            "generation": form.generation,
            "job": JOB,
            "listener": listener,
            "addresses": form.addresses,
            "moves": form.restore.moves if isinstance(form.restore, FromMemory) else (),
            "progress": Unwatched(),
            "donors": form.donors,
            "form_timeout_s": 60.0,
        }
        answers: list[Answer] = []
        cause = ""
        try:
            if me in form.donors:
                session = Donation(me=me, **common)
                session.open()
                if dies_after is not None:
                    _die_after(session, dies_after)
                trainer.donate(session, form)
            else:
                seat = form.plan.seat_of[me]
                session = Session(profile=profile, seat=seat, mirrors=1, backend="links", **common)
                session.open()
                if dies_after is None:
                    session.vote = partial(_say_and_vote, voting, session.vote)  # type: ignore[method-assign]
                else:
                    session.vote = partial(_die_in_the_vote, voting, len(form.plan.devices) - 1)  # type: ignore[method-assign]
                trainer.restore(session, form)
                answers = [trainer.step(session, Step(step)) for step in range(form.committed + 1, last + 1)]
        except Exception as problem:
            cause = str(problem)
            session.close()
        end.send((answers, trainer.report(form.generation, None, cause)))


def _die_after(donation: Donation, rounds: int) -> None:
    """SIGKILL once so many rounds of messages have left for good."""
    post, posted = donation.post, []

    def counted(sends: Any, receives: Any) -> Any:
        if len(posted) == rounds:
            for one in posted:
                one.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        posted.append(post(sends, receives))
        return posted[-1]

    donation.post = counted  # type: ignore[method-assign]


def _die_in_the_vote(voting: Any, others: int, *_: Any) -> torch.Tensor:
    """Once the others have received everything, and wait for this rank's vote."""
    for _ in range(others):
        assert voting.acquire(timeout=60), "somebody does not vote"
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _say_and_vote(voting: Any, vote: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    voting.release()
    return vote(*given)


def shrunk(reports: Mapping[Device, RankReport], closed: int, step: int, plans: Mapping[Generation, Plan]) -> RestorePlan:
    answer = next((report.answer for report in reports.values() if report.answer), None)
    return choose_restore(
        settlement=settle(Generation(closed), Step(step), answer, reports),
        plans=plans,
        usable=frozenset(reports),
        target=SMALLER,
        profile=PROGRAM.describe(SPEC),
        mirrors=1,
        checkpoint=None,
    )


def formed(group: Ranks, generation: int, plan: Plan, restore: RestorePlan | None) -> FormGeneration:
    moves = restore.restore.moves if restore and isinstance(restore.restore, FromMemory) else ()
    donors = tuple(sorted({m.source for m in moves} - set(plan.devices)))
    return FormGeneration(
        generation=Generation(generation),
        plan=plan,
        addresses={device: group.addresses[device] for device in (*plan.devices, *donors)},
        restore=restore.restore if restore else FromSeed(),
        committed=restore.step if restore else Step(0),
        donors=donors,
    )


def most_generous(form: FormGeneration) -> tuple[Device, int]:
    """The donor whose giving takes most rounds of messages, and how many."""
    assert isinstance(form.restore, FromMemory)
    given: dict[tuple[Device, Device], list[Interval]] = defaultdict(list)
    for move in form.restore.moves:
        given[move.source, move.target].append(move.interval)
    rounds = {
        pair: len(relayout.messages(intervals, MESSAGE)) for pair, intervals in given.items() if pair[0] in form.donors
    }
    pair = max(rounds, key=lambda pair: rounds[pair])
    return pair[0], rounds[pair]


def test_donor_killed_in_the_middle_costs_no_step_and_nothing_is_sent_twice() -> None:
    plans = {Generation(1): TP2_PP2_DP2, Generation(2): SMALLER}
    with ranks(TP2_PP2_DP2.devices) as group:
        said = group.form(formed(group, 1, TP2_PP2_DP2, None), 3)
        form = formed(group, 2, SMALLER, shrunk({d: report for d, (_, report) in said.items()}, 1, 3, plans))
        donor, rounds = most_generous(form)
        assert rounds >= 4
        reports = {d: report for d, (_, report) in group.form(form, 3, {donor: rounds // 2}).items()}
        assert donor not in reports
        again = shrunk(reports, 2, 3, plans)
        forgetful = shrunk({d: replace(r, arrived=None) for d, r in reports.items()}, 2, 3, plans)
        assert isinstance(again.restore, FromMemory) and again.step == 3
        assert 0 < again.moved_elements < forgetful.moved_elements
        assert_equals_reference(group.form(formed(group, 3, SMALLER, again), 8), 3)


def test_what_only_the_dead_held_counts_where_it_has_arrived() -> None:
    """Owner and mirror of a part are both dead when the third generation forms: no step is run again all the same."""
    plans = {Generation(1): TP2_PP2_DP2, Generation(2): SMALLER}
    donor = TP2_PP2_DP2.devices[4]
    with ranks(TP2_PP2_DP2.devices) as group:
        said = group.form(formed(group, 1, TP2_PP2_DP2, None), 3)
        mirror, member = partners(TP2_PP2_DP2)[donor], SMALLER.devices[0]
        group.kill(mirror)
        first = shrunk({d: report for d, (_, report) in said.items() if d != mirror}, 1, 3, plans)
        reports = {d: report for d, (_, report) in group.form(formed(group, 2, SMALLER, first), 3, {member: 0}).items()}
        group.kill(donor)
        group.start(member)
        del reports[donor]
        again = shrunk(reports, 2, 3, plans)
        forgetful = shrunk({d: replace(r, arrived=None) for d, r in reports.items()}, 2, 3, plans)
        assert forgetful.step == 0, "a part is in nobody's memory but where it has just arrived"
        assert isinstance(again.restore, FromMemory) and again.step == 3
        assert_equals_reference(group.form(formed(group, 3, SMALLER, again), 6), 3)


def assert_equals_reference(said: Mapping[Device, tuple[list[Answer], RankReport]], after: int) -> None:
    for device in SMALLER.devices:
        mine, report = said[device]
        last = report.passed
        assert [a.step for a in mine] == list(range(after + 1, last + 1)) and last > after, report.cause
        assert [a.loss for a in mine] == pytest.approx([a.loss for a in run(SPEC, last)[after:]], rel=1e-5)
        assert report.arrived is None and report.held is not None and report.held.generation == 3
