"""One rank's mathematics among real peers: forked processes, real sessions, and an undisturbed single process to equal."""

from __future__ import annotations

import gc
import math
import multiprocessing
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from orchestrator.adapters import manifest
from orchestrator.domain.generation import Answer, Held, RankReport
from orchestrator.domain.host_events import ShardSaved
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.layout import layout, partners, transfers
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed, Restore
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import CheckpointSpec, DataSpec, EvaluationSpec, JobSpec, TrainSpec
from tests.direct import Direct
from worker.data.sources import load
from worker.findings import TrainingDiverged
from worker.loop import Trainer
from worker.parallel.group import Aborted
from worker.program import load_program
from worker.progress import Phase, Unwatched
from worker.reference import run
from worker.session import Session
from worker.state.holdings import Holdings
from worker.warming import warm

pytestmark = pytest.mark.timeout(300)
torch.set_num_threads(1)

SPEC = JobSpec(
    name="small",
    program="causal_lm",
    data=DataSpec(files=("{stdlib}/json/*.py",)),
    train=TrainSpec(steps=20, micro_batches=4, micro_batch_size=2, sequence=32, warmup_steps=3),
    model={"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64},
    checkpoint=CheckpointSpec(every=0),
)
PROGRAM = load_program("causal_lm")

STEP = ["COMPUTE", "REDUCE", "VOTE", "voted", "passed", "UPDATE", "GATHER"]
Leave = tuple[int, Literal["before", "after"]]
"""Leave in the vote of a step: before it can pass, or when it has passed everywhere but here."""


# --- plans ---------------------------------------------------------------------------------------------------------------


def a_plan(*pipelines: tuple[list[int], list[int]], tp: int = 1, nodes: str = "abcd") -> Plan:
    """Each pipeline as (layer cuts, micro-batch ids); devices two to a node."""
    devices = iter(Device(NodeId(node), index) for node in nodes for index in range(2))
    return Plan(
        pipelines=tuple(
            Pipeline(
                stages=tuple(
                    Stage(first=a, last=b, devices=tuple(next(devices) for _ in range(tp))) for a, b in pairwise(cuts)
                ),
                micro_batches=tuple(ids),
            )
            for cuts, ids in pipelines
        )
    )


TP2_PP2_DP2 = a_plan(([0, 3, 6], [0, 1]), ([0, 3, 6], [2, 3]), tp=2)


# --- ranks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one rank answers after a stretch of steps."""

    answers: list[Answer]
    report: RankReport
    held: dict[str, tuple[tuple[Any, ...], torch.Tensor]]
    """"owned" and "mirrored" -> intervals and state, to compare holders bit by bit."""
    shards: list[ShardSaved]
    phases: Mapping[str, float]
    error: str


class Watch(Unwatched):
    """Notes the order in which progress is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def phase(self, phase: Phase, generation: Generation, step: Step) -> None:
        self.heard.append(phase.name)

    def voted(self, step: Step) -> None:
        self.heard.append("voted")

    def passed(self, answer: Answer) -> None:
        self.heard.append("passed")


class Ranks:
    """A process per device, as a host would have; the test is their supervisor."""

    def __init__(self, spec: JobSpec, devices: tuple[Device, ...], directory: Path) -> None:
        self.spec = spec
        self.profile = PROGRAM.describe(spec)
        context = multiprocessing.get_context("fork")
        listeners = {device: socket.create_server(("127.0.0.1", 0), backlog=64) for device in devices}
        self.addresses = {device: f"127.0.0.1:{s.getsockname()[1]}" for device, s in listeners.items()}
        tokens = load(spec.data)
        self._ends: dict[Device, Connection] = {}
        self._processes = []
        for device in devices:
            here, there = context.Pipe()
            process = context.Process(
                target=_rank, args=(spec, self.profile, tokens, device, listeners[device], there, directory), daemon=True
            )
            process.start()
            there.close()
            self._ends[device] = here
            self._processes.append(process)
        for listener in listeners.values():
            listener.close()

    def run(
        self,
        plan: Plan,
        generation: int,
        restore: Restore,
        last: int,
        leave: Mapping[Device, Leave] | None = None,
        anew: Device | None = None,
    ) -> dict[Device, Said]:
        """Form, restore, train up to and including step `last`. anew: it remembers nothing, as a forked rank would."""
        form = FormGeneration(
            generation=Generation(generation),
            plan=plan,
            addresses={device: self.addresses[device] for device in plan.devices},
            restore=restore,
            committed=_step(restore),
        )
        for device in plan.devices:
            self._ends[device].send((form, last, (leave or {}).get(device), device == anew))
        said = {}
        for device in plan.devices:
            assert self._ends[device].poll(100), f"{device} did not answer"
            said[device] = self._ends[device].recv()
        return said

    def close(self) -> None:
        for end in self._ends.values():
            end.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def ranks(spec: JobSpec, plan: Plan, directory: Path) -> Iterator[Ranks]:
    made = Ranks(spec, plan.devices, directory)
    try:
        yield made
    finally:
        made.close()


def _rank(
    spec: JobSpec, profile: Any, tokens: torch.Tensor, me: Device, listener: socket.socket, end: Connection, root: Path
) -> None:
    gc.freeze()
    shards: list[ShardSaved] = []
    watch = Watch()
    snapshots = Direct(root, profile, me, shards)
    trainer = Trainer(spec, profile, PROGRAM, tokens, me, watch, snapshots)
    session: Session | None = None
    while (order := end.recv()) is not None:
        form, last, leave, is_anew = order
        if is_anew:
            trainer = Trainer(spec, profile, PROGRAM, tokens, me, watch, snapshots)
        if session is not None:
            session.close()
        session = Session(
            plan=form.plan,
            profile=profile,
            seat=form.plan.seat_of[me],
            generation=form.generation,
            job=JobId("job"),
            listener=listener,
            addresses=form.addresses,
            mirrors=spec.recovery.mirrors,
            moves=form.restore.moves if isinstance(form.restore, FromMemory) else (),
            backend=spec.recovery.backend,
            progress=watch,
            form_timeout_s=60.0,
        )
        answers: list[Answer] = []
        phases: Mapping[str, float] = {}
        error = ""
        try:
            session.open()
            phases = trainer.restore(session, form)
            for step in range(_step(form.restore) + 1, last + 1):
                if leave is not None and leave[0] == step:
                    _leave_in_vote(session, leave[1])
                watch.heard.clear()
                answers.append(trainer.step(session, Step(step)))
                if watch.heard[_last_pass(watch.heard) :][:7] != STEP or watch.heard.count("passed") != 1:
                    error = f"progress was told {watch.heard}"
        except Exception as problem:
            error = "".join(traceback.format_exception(problem))
            session.close()  # to peers this looks like a death, as it would when they are told to leave
        end.send(
            Said(
                answers=answers,
                report=trainer.report(form.generation),
                held=_held(trainer.holdings),
                shards=list(shards),
                phases=phases,
                error=error,
            )
        )
    if session is not None:
        session.close()


def _last_pass(heard: list[str]) -> int:
    """An exact step whose scale did not fit is run again."""
    return max(place for place, word in enumerate(heard) if word == "COMPUTE")


def _leave_in_vote(session: Session, when: Literal["before", "after"]) -> None:
    vote = session.vote

    def leave(ballot: torch.Tensor, num_maxima: int = 0) -> torch.Tensor:
        if when == "after":
            vote(ballot, num_maxima)
        raise Aborted("told to leave in the vote")

    session.vote = leave  # type: ignore[method-assign]


def _held(holdings: Holdings | None) -> dict[str, tuple[tuple[Any, ...], torch.Tensor]]:
    if holdings is None:
        return {}
    cut, count = holdings.owned, len(holdings.owned_pieces)
    return {
        "owned": (holdings.intervals[:count], holdings.state[:, :cut].clone()),
        "mirrored": (holdings.intervals[count:], holdings.state[:, cut:].clone()),
    }


def _step(restore: Restore) -> Step:
    match restore:
        case FromMemory():
            return restore.step
        case FromCheckpoint():
            return restore.checkpoint.step
        case _:
            return Step(0)


# --- what must hold ------------------------------------------------------------------------------------------------------


def assert_equal_to(reference: list[Answer], said: dict[Device, Said], tolerance: float = 1e-5) -> None:
    """Every rank saw the same answers, and they are the reference's steps."""
    for one in said.values():
        assert not one.error, one.error
    everybody = [one.answers for one in said.values()]
    assert all(answers == everybody[0] for answers in everybody)
    assert everybody[0]
    for answer in everybody[0]:
        expected = reference[answer.step - 1]
        assert answer.step == expected.step
        assert math.isclose(answer.norm, expected.norm, rel_tol=10 * tolerance)
        for mine, theirs in zip(answer.losses, expected.losses, strict=True):
            assert math.isclose(mine, theirs, rel_tol=tolerance)
        assert (answer.evaluation is None) == (expected.evaluation is None)
        if answer.evaluation is not None and expected.evaluation is not None:
            assert answer.evaluation.step == expected.evaluation.step == answer.step - 1
            assert answer.evaluation.loss == pytest.approx(expected.evaluation.loss, rel=tolerance)


def assert_mirrors_equal_owners(plan: Plan, said: dict[Device, Said]) -> None:
    for owner, mirror in partners(plan).items():
        intervals, state = said[owner].held["owned"]
        assert said[mirror].held["mirrored"][0] == intervals
        assert torch.equal(said[mirror].held["mirrored"][1], state), f"{mirror} differs from {owner}"


def moved(spec: JobSpec, old: Plan, new: Plan, step: int, answer: Answer | None, alive: set[Device]) -> FromMemory:
    profile = PROGRAM.describe(spec)
    before = layout(old, profile, mirrors=1)
    found = transfers({d: before.held(d) for d in old.devices if d in alive}, layout(new, profile, mirrors=1))
    assert not found.missing
    return FromMemory(step=Step(step), answer=answer, moves=found.moves)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        pytest.param(TP2_PP2_DP2, {}, id="tp2-pp2-dp2"),
        pytest.param(TP2_PP2_DP2, {"tied": True, "dropout": 0.1}, id="tp2-pp2-dp2-tied-dropout"),
        pytest.param(a_plan(([0, 2, 6], [0, 2, 3]), ([0, 6], [1])), {"tied": True}, id="unequal-pipelines-tied"),
        pytest.param(a_plan(([0, 1, 4, 6], [3, 1, 0, 2])), {}, id="pp3"),
    ],
)
def test_any_plan_equals_a_single_process(plan: Plan, model: dict[str, Any], tmp_path: Path) -> None:
    spec = replace(SPEC, model={**SPEC.model, **model}, evaluation=EvaluationSpec(every=3, micro_batches=5))
    reference = run(spec, 10)
    assert [answer.step for answer in reference if answer.evaluation is not None] == [4, 7, 10]
    with ranks(spec, plan, tmp_path) as group:
        said = group.run(plan, 1, FromSeed(), 10)
    assert_equal_to(reference, said)
    assert_mirrors_equal_owners(plan, said)
    for device, one in said.items():
        assert one.report == RankReport(
            device=device,
            generation=Generation(1),
            voted=Step(10),
            answer=one.answers[-1],
            held=Held(generation=Generation(1), step=Step(10)),
            answered_in=Generation(1),
        )


def test_bf16_stays_within_a_hundredth(tmp_path: Path) -> None:
    spec = replace(SPEC, train=replace(SPEC.train, dtype="bf16"), model={**SPEC.model, "tied": True})
    with ranks(spec, TP2_PP2_DP2, tmp_path) as group:
        said = group.run(TP2_PP2_DP2, 1, FromSeed(), 10)
    assert_mirrors_equal_owners(TP2_PP2_DP2, said)
    assert_equal_to(run(spec, 10), said, 1e-2)
    assert_equal_to(run(replace(spec, train=replace(spec.train, dtype="fp32")), 10), said, 1e-2)


SMALLER = a_plan(([0, 2, 4, 6], [0, 1, 2, 3]))
TP2_DP1 = a_plan(([0, 6], [0, 1, 2, 3]), tp=2)


def test_a_checkpoint_restores_into_any_other_plan(tmp_path: Path) -> None:
    spec = replace(SPEC, checkpoint=CheckpointSpec(every=5))
    reference = run(spec, 9)
    with ranks(spec, TP2_PP2_DP2, tmp_path) as group:
        said = group.run(TP2_PP2_DP2, 1, FromSeed(), 7)
        shards = [event for one in said.values() for event in one.shards]
        assert {(event.step, event.generation) for event in shards} == {(5, 1)}
        path = tmp_path / manifest.directory_name(Step(5), Generation(1))
        ref = manifest.commit(path, Step(5), Generation(1), "hash", 0, [event.shard for event in shards])
        assert manifest.latest(tmp_path) == ref
        for generation, plan in enumerate((SMALLER, TP2_DP1, TP2_PP2_DP2), start=2):
            again = group.run(plan, generation, FromCheckpoint(checkpoint=ref), 9)
            assert_equal_to(reference, again)
            assert [answer.step for answer in again[plan.devices[0]].answers] == [6, 7, 8, 9]
            assert_mirrors_equal_owners(plan, again)
        # The very plan that wrote it goes on with the same bits.
        whole = {answer.step: answer for answer in said[TP2_PP2_DP2.devices[0]].answers}
        assert again[TP2_PP2_DP2.devices[0]].answers[:2] == [whole[6], whole[7]]


def test_the_last_step_is_saved_before_the_step_returns(tmp_path: Path) -> None:
    spec = replace(SPEC, train=replace(SPEC.train, steps=3), checkpoint=CheckpointSpec(every=50))
    plan = a_plan(([0, 6], [0, 1, 2, 3]))
    with ranks(spec, plan, tmp_path) as group:
        said = group.run(plan, 1, FromSeed(), 3)
    shards = [event for one in said.values() for event in one.shards]
    path = tmp_path / manifest.directory_name(Step(3), Generation(1))
    saved = manifest.commit(path, Step(3), Generation(1), "h", 0, [e.shard for e in shards])
    assert (saved.step, saved.generation, saved.path) == (3, 1, str(path))
    assert saved.answer == said[plan.devices[0]].answers[-1]


def test_a_final_state_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    spec = replace(SPEC, train=replace(SPEC.train, steps=2), checkpoint=CheckpointSpec(every=1))
    plan = a_plan(([0, 6], [0, 1, 2, 3]))
    (tmp_path / "file").write_text("not a directory")
    with ranks(spec, plan, tmp_path / "file") as group:
        (said,) = group.run(plan, 1, FromSeed(), 2).values()
    assert len(said.answers) == 1, "an earlier checkpoint that cannot be written stops nothing"
    assert "the final state could not be written" in said.error
    assert said.report.held == Held(generation=Generation(1), step=Step(2))


def test_survivors_of_a_lost_node_go_on_under_a_smaller_plan_and_grow_again(tmp_path: Path) -> None:
    reference = run(SPEC, 12)
    with ranks(SPEC, TP2_PP2_DP2, tmp_path) as group:
        group.run(TP2_PP2_DP2, 1, FromSeed(), 4)
        alive = {device for device in TP2_PP2_DP2.devices if device.node != "c"}
        smaller = a_plan(([0, 3, 6], [0, 1, 2]), ([0, 6], [3]), tp=2, nodes="abd")
        said = group.run(smaller, 2, moved(SPEC, TP2_PP2_DP2, smaller, 4, None, alive), 8)
        assert_equal_to(reference, said)
        assert_mirrors_equal_owners(smaller, said)
        assert all(one.report.held == Held(generation=Generation(2), step=Step(8)) for one in said.values())
        # The node's processes still hold generation 1's state of step 4: it must not count.
        again = group.run(TP2_PP2_DP2, 3, moved(SPEC, smaller, TP2_PP2_DP2, 8, None, set(smaller.devices)), 12)
        assert_equal_to(reference, again)
        assert_mirrors_equal_owners(TP2_PP2_DP2, again)


@pytest.mark.parametrize("passed", ["nobody", "some", "everybody"])
def test_a_generation_broken_in_the_vote_is_settled_and_goes_on_with_the_same_bits(passed: str, tmp_path: Path) -> None:
    devices = TP2_PP2_DP2.devices
    with ranks(SPEC, TP2_PP2_DP2, tmp_path) as group:
        undisturbed = group.run(TP2_PP2_DP2, 1, FromSeed(), 6)
        leave: dict[Device, Leave] = {
            device: (4, "before" if passed == "nobody" else "after")
            for number, device in enumerate(devices)
            if passed == "nobody" or (passed == "some" and number % 2)
        }
        last = 4 if passed == "everybody" else 3 + (passed == "some")
        broken = group.run(TP2_PP2_DP2, 2, FromSeed(), 4, leave)
        answer = next((one.report.answer for one in broken.values() if one.report.passed == 4), None)
        assert (answer is None) == (passed == "nobody")
        for device, one in broken.items():
            left = device in leave
            assert one.report.voted == 4
            assert one.report.passed == (3 if left else 4)
            assert one.report.held == Held(generation=Generation(2), step=Step(3 if left else 4))
        # One rank is the one that was killed.
        alive = set(devices[:-1])
        restore = moved(SPEC, TP2_PP2_DP2, TP2_PP2_DP2, last, answer, alive)
        restored = group.run(TP2_PP2_DP2, 3, restore, 6, anew=devices[-1])
    for device in devices:
        assert not restored[device].error, restored[device].error
        assert restored[device].answers == undisturbed[device].answers[last:]
        for part in ("owned", "mirrored"):
            assert torch.equal(restored[device].held[part][1], undisturbed[device].held[part][1])


def test_a_second_failure_while_restoring_leaves_the_old_state_usable(tmp_path: Path) -> None:
    reference = run(SPEC, 6)
    other = a_plan(([0, 2, 6], [0, 1]), ([0, 4, 6], [2, 3]), tp=2)
    with ranks(SPEC, TP2_PP2_DP2, tmp_path) as group:
        group.run(TP2_PP2_DP2, 1, FromSeed(), 3)
        good = moved(SPEC, TP2_PP2_DP2, other, 3, None, set(TP2_PP2_DP2.devices))
        # One rank finds that it cannot provide what it was to provide, and leaves while the others restore.
        first = other.devices[0]
        mine = layout(TP2_PP2_DP2, PROGRAM.describe(SPEC), mirrors=1).held(first)
        foreign = next(m for m in good.moves if all(m.interval.intersect(i) is None for i in mine))
        failed = group.run(other, 2, replace(good, moves=(*good.moves, replace(foreign, source=first))), 3)
        assert "NotHeld" in failed[first].error
        for one in failed.values():
            assert one.error
            assert one.report.held == Held(generation=Generation(1), step=Step(3))
            assert one.report.generation == 2
        assert_equal_to(reference, group.run(other, 3, good, 6))


def test_a_loss_that_is_not_finite_stops_every_rank_before_anything_is_updated(tmp_path: Path) -> None:
    train = replace(SPEC.train, learning_rate=1e30, min_learning_rate=1e30, warmup_steps=0)
    spec = replace(SPEC, train=train)
    plan = a_plan(([0, 3, 6], [0, 1, 2, 3]))
    with ranks(spec, plan, tmp_path) as group:
        said = group.run(plan, 1, FromSeed(), 10)
    steps = {one.report.passed for one in said.values()}
    assert len(steps) == 1
    for one in said.values():
        assert TrainingDiverged.__name__ in one.error and "lower train.learning_rate" in one.error
        assert one.report.held == Held(generation=Generation(1), step=one.report.passed)
        assert one.report.voted == one.report.passed + 1


def test_warming_starts_no_thread_and_changes_nothing(tmp_path: Path) -> None:
    def check() -> bool:
        warm(SPEC, PROGRAM.describe(SPEC), PROGRAM)
        warm(replace(SPEC, train=replace(SPEC.train, dtype="bf16")), PROGRAM.describe(SPEC), PROGRAM)
        return len(list(Path("/proc/self/task").iterdir())) == 1

    assert in_a_new_process(check)


def in_a_new_process(check: Callable[[], bool]) -> bool:
    process = multiprocessing.get_context("fork").Process(target=lambda: exit(not check()))
    process.start()
    process.join(60)
    return process.exitcode == 0
