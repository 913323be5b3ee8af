"""A job that begins with another one's checkpoint meets trouble: it goes back there and no further, never to its seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.events import ProgramProbed
from orchestrator.sim.run import Verdict, play
from orchestrator.sim.scenario import Scenario, Trouble, begun_elsewhere, scenario
from orchestrator.supervisor import deadlines, kernel

SEEDS = range(6)
LOSSES = (Trouble.KILL_RANK, Trouble.KILL_NODE, Trouble.ADD_NODE, Trouble.KILL_HOST, Trouble.CRASH_SUPERVISOR)


def scene(seed: int) -> Scenario:
    """Without mirrors, and without a checkpoint of its own in half of them."""
    drawn = scenario(seed, steps=60)
    job = begun_elsewhere(drawn.jobs[0])
    job = replace(
        job,
        recovery=replace(job.recovery, mirrors=0),
        checkpoint=replace(job.checkpoint, every=5 if seed % 2 else 0),
    )
    return replace(
        drawn, jobs=(job,), starts={"job0": 10 + seed}, troubles=LOSSES, between_s=0.5, trouble_until_s=10.0, broken={}
    )


def test_it_goes_back_to_what_it_began_with_and_makes_every_step_after_that() -> None:
    found = [play(replace(scene(seed), gentle=False)) for seed in SEEDS]
    for one in found:
        assert one.verdict is Verdict.PASSED, "\n".join((*one.trace[-40:], f"{one.verdict}: {one.message}"))
    told = [line for one in found for line in one.trace]
    assert any("committed steps are run again: " in line and "from the checkpoint of step 1" in line for line in told)


def test_a_checkpoint_that_is_asked_for_is_made_whatever_happens_meanwhile() -> None:
    found = []
    for seed in SEEDS:
        drawn = scene(seed)
        job = replace(
            drawn.jobs[0],
            checkpoint=replace(drawn.jobs[0].checkpoint, every=0),
            recovery=replace(drawn.jobs[0].recovery, mirrors=1),
            train=replace(drawn.jobs[0].train, steps=200),
        )
        found.append(play(replace(drawn, jobs=(job,), gentle=False, saves=(3.0, 5.0, 7.0))))
    for one in found:
        assert one.verdict is Verdict.PASSED, "\n".join((*one.trace[-40:], f"{one.verdict}: {one.message}"))
        assert sum("a checkpoint has been asked for" in line for line in one.trace) == 3
        assert any(": checkpoint of step" in line and "is committed" in line for line in one.trace), (
            "it makes none by itself"
        )


def test_a_generation_that_reads_for_longer_than_it_may_take_to_form_is_let_read(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = replace(scene(1), troubles=(Trouble.KILL_RANK,), between_s=1e9, slow_reads=True, trouble_until_s=1.0)
    found = play(drawn)
    assert found.verdict is Verdict.PASSED, "\n".join((*found.trace[-40:], f"{found.verdict}: {found.message}"))
    told = "\n".join(found.trace)
    assert "restoring step 11 takes a while" in told and "did not become ready" not in told
    monkeypatch.setattr(deadlines, "_moved", lambda record: "")
    assert "did not become ready in time" in "\n".join(play(drawn).trace), "it takes longer than that"


def test_one_that_the_disk_refuses_is_tried_again_in_the_same_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens: no other generation would ask again."""
    monkeypatch.setattr("orchestrator.sim.host.DISK_FULL", 0.15)
    for seed in range(10, 20):
        drawn = scenario(seed, steps=200)
        job = replace(drawn.jobs[0], checkpoint=replace(drawn.jobs[0].checkpoint, every=0))
        found = play(replace(drawn, jobs=(job,), failures=0, starts={}, broken={}, saves=(3.0,)))
        assert found.verdict is Verdict.PASSED, "\n".join((*found.trace[-40:], f"{found.verdict}: {found.message}"))
        tried = any("it is tried again in 5 s" in line for line in found.trace)
        made = any(": checkpoint of step" in line and "is committed" in line for line in found.trace)
        if tried and made:
            return
    pytest.fail("no disk refused what a later attempt made")


def test_a_kernel_that_forgets_what_a_job_begins_with_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = kernel.step

    def forgets(now: float, state: kernel.State, inputs: object) -> kernel.Stepped:
        known = [replace(one, start=None) if isinstance(one, ProgramProbed) else one for one in inputs]  # type: ignore[attr-defined]
        return step(now, state, known)

    monkeypatch.setattr("orchestrator.sim.supervisor.step", forgets)
    found = play(scene(1))
    assert found.verdict is not Verdict.PASSED and "asked for a checkpoint" in found.message
