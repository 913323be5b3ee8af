"""Which checkpoints the kernel keeps and believes: canaries, files that cannot be read, and the way back to older ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.checkpoint import CheckpointRef, ShardRef
from orchestrator.domain.effects import CommitCheckpoint, NoteCheckpoint, PruneCheckpoints
from orchestrator.domain.events import CheckpointCommitted, CheckpointsPruned, DeadlinePassed, EffectDone
from orchestrator.domain.failure import Cause
from orchestrator.domain.generation import Unreadable
from orchestrator.domain.host_events import RankReady, ShardSaved, StepsPassed
from orchestrator.domain.ids import Generation, NodeId, Step
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import CheckpointSpec
from orchestrator.domain.state import Failed, Reforming, Running, Stopping
from orchestrator.recovery.breaker import REST_S, TRIES
from orchestrator.recovery.canary import difference
from orchestrator.recovery.retention import kept
from orchestrator.supervisor.deadlines import deadlines
from orchestrator.supervisor.keeping import LEARNED_S, REFUSED_S
from tests.builders import JOB, Bench, a_report, a_spec, an_answer

NODES = tuple(NodeId(f"n{number}") for number in range(4))


def saved(*at: int, keep_last: int = 3) -> Bench:
    """Checkpoints at these steps, and one step more."""
    spec = a_spec(tp=2)
    spec = replace(spec, checkpoint=replace(spec.checkpoint, keep_last=keep_last), train=replace(spec.train, steps=1000))
    bench = Bench(spec=spec).running()
    for step in range(1, max(at) + 2):
        bench.passed(step)
        if step in at:
            bench.checkpoint(step, an_answer(step))
    return bench


def everything_is_lost(bench: Bench) -> Bench:
    for node in NODES:
        bench.host_gone(node)
    return bench.planned().opened().prepared()


def passes_differently(bench: Bench, step: int) -> Bench:
    answer = an_answer(step)
    other = replace(answer, losses=tuple(loss + 0.5 for loss in answer.losses))
    event = StepsPassed(generation=bench.record.generation, answers=(other,), at=(bench.now,))
    return bench.said(bench.plan.nodes[0], event)


def all_report(bench: Bench, *, step: int | None, passed: int | None = None) -> Bench:
    """Everybody holds `step`, or nothing, and saw `passed` pass; then the next generation is formed."""
    assert isinstance(bench.state, Reforming)
    generation, saw = bench.state.closing.generation, (step or 0) if passed is None else passed
    bench.all_report(lambda device: a_report(device, generation=generation, voted=step or 0, passed=saw, held=step))
    return bench.planned().prepared()


def unreadable(bench: Bench, step: int, *, is_away: bool = False) -> Bench:
    report = a_report(bench.device(1), generation=bench.record.generation, held=None)
    found = Unreadable(step=Step(step), generation=Generation(1), is_away=is_away)
    return bench.reports(replace(report, found=found, cause="bad hash"))


def restored_step(bench: Bench) -> int:
    restore = bench.form().restore
    assert isinstance(restore, FromCheckpoint)
    return restore.checkpoint.step


# --- kept ----------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_told_to_the_disk_after_each_commit() -> None:
    bench = saved(5, 10, 15, keep_last=2)
    assert bench.record.checkpoint and bench.record.checkpoint.step == 15
    assert [one.step for one in bench.record.older] == [10]
    pruned = [effect for effect in bench.record.outbox.values() if isinstance(effect, PruneCheckpoints)]
    assert [[one.step for one in effect.keep] for effect in pruned] == [[5], [10, 5], [15, 10]]


def a_checkpoint(step: int, loss: float = 1.0, *, is_proven: bool = False) -> CheckpointRef:
    answer = replace(an_answer(step), losses=(loss,))
    return CheckpointRef(
        step=Step(step), generation=Generation(1), path=f"/{step}", answer=answer, is_proven=is_proven, after=(loss,)
    )


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (CheckpointSpec(keep_last=1), [60, 30]),
        (CheckpointSpec(keep_last=2), [60, 50, 30]),
        (CheckpointSpec(keep_last=1, keep_every=20), [60, 40, 30, 20]),
        (CheckpointSpec(keep_last=1, keep_best=2), [60, 50, 30, 10]),
    ],
)
def test_policies_add_up_and_the_newest_and_the_proven_one_always_stay(policy: CheckpointSpec, wanted: list[int]) -> None:
    losses = {60: 1.0, 50: 0.4, 40: 0.9, 30: 0.8, 20: 0.7, 10: 0.5}
    found = kept([a_checkpoint(step, loss, is_proven=step == 30) for step, loss in losses.items()], policy)
    assert [one.step for one in found] == wanted


def test_what_a_job_began_with_stays_as_the_last_way_back() -> None:
    """An entry and its base are two of its own, and are lost together (seed 42264)."""
    begun = a_checkpoint(10, 0.9)
    known = [replace(a_checkpoint(step, 0.9), at=float(step)) for step in (40, 30, 20)]
    policy = CheckpointSpec(keep_last=2, restore_from="/shared/another")
    assert [one.step for one in kept([*known, begun], policy)] == [40, 30, 10]
    assert [one.step for one in kept([*known, begun], replace(policy, restore_from=""))] == [40, 30]


def test_what_is_left_of_a_closed_generation_is_committed_by_nobody() -> None:
    """A rank that comes back from the dead must not mix two attempts at one step."""
    bench = saved(5)
    stale = bench.record.generation
    everything_is_lost(bench).ready().passed(6, 7)

    def commits() -> list[tuple[Step, Generation]]:
        return [(one.step, one.generation) for one in bench.record.outbox.values() if isinstance(one, CommitCheckpoint)]

    for device in bench.plan.devices:
        shard = ShardRef(device=device, index=f"7-{device}", sha256="0")
        bench.said(device.node, ShardSaved(generation=stale, step=Step(7), shard=shard))
    assert commits() == [] and not bench.record.saving
    bench.saved(7)
    assert commits() == [(7, bench.record.generation)] and bench.record.generation != stale


def test_packs_are_condemned_in_the_record_refused_when_writers_know_and_deleted_after_that() -> None:
    bench = saved(5)
    bench.tell(CheckpointsPruned(job=JOB, condemnable=("a/1.pack", "a/2.pack"), deleted=()))

    def next_ones() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Of the next checkpoint: refused by its commit, told to writers, deleted by its sweep."""
        step = bench.record.committed + 1
        bench.passed(step).saved(step)
        ((number, commit),) = (
            (number, one) for number, one in bench.record.outbox.items() if isinstance(one, CommitCheckpoint)
        )
        bench.tell(EffectDone(job=JOB, effect=number)).checkpoint(step)
        prune = next(one for one in reversed(bench.record.outbox.values()) if isinstance(one, PruneCheckpoints))
        return commit.condemned, prune.condemned, prune.doomed

    both = ("a/1.pack", "a/2.pack")
    assert next_ones() == ((), both, ())
    bench.now += LEARNED_S
    assert next_ones() == (both, both, ())
    bench.now += REFUSED_S - LEARNED_S
    assert next_ones() == (both, both, both)
    bench.tell(CheckpointsPruned(job=JOB, condemnable=(), deleted=("a/1.pack",)))
    assert set(bench.record.condemned) == {"a/2.pack"}


def test_nothing_is_swept_while_ranks_may_be_reading_it() -> None:
    bench = everything_is_lost(saved(5, 10))
    assert restored_step(bench) == 10
    before = bench.record.outbox
    again = CheckpointRef(step=Step(10), generation=Generation(1), path="/shared/10 again", answer=an_answer(10))
    bench.tell(CheckpointCommitted(job=JOB, checkpoint=again))
    assert bench.record.checkpoint is not None and bench.record.checkpoint.path == again.path
    new = [effect for number, effect in bench.record.outbox.items() if number not in before]
    assert not [effect for effect in new if isinstance(effect, PruneCheckpoints)]
    bench.ready().passed(11).checkpoint(11, an_answer(11))
    assert [effect for effect in bench.record.outbox.values() if isinstance(effect, PruneCheckpoints)][-1].keep[
        0
    ].step == 11


def test_a_piece_that_was_bad_in_one_tier_is_said_and_nothing_else_comes_of_it() -> None:
    bench = everything_is_lost(saved(5, 10))
    device, generation = bench.device(0), bench.record.generation
    said = RankReady(device=device, generation=generation, phases={}, notes=("a.pack: p of head is bad on n0's disk",))
    bench.said(device.node, said)
    assert bench.history[-1].type == "checkpoint_damaged"
    assert bench.history[-1].message == f"{device} reads it elsewhere: a.pack: p of head is bad on n0's disk"
    assert bench.record.checkpoint is not None and bench.record.checkpoint.step == 10


def test_the_plan_says_from_which_disks_a_checkpoint_is_read_whatever_generation_wrote_it() -> None:
    bench = saved(5)
    near = CheckpointRef(step=Step(6), generation=Generation(1), path="/shared/6", answer=an_answer(6), local=NODES)
    bench.tell(CheckpointCommitted(job=JOB, checkpoint=near))
    everything_is_lost(bench)
    for _ in range(2):  # of the second one the plan is two generations old
        assert restored_step(bench) == 6
        source = bench.record.incidents[-1].source
        assert "from the checkpoint of step 6: " in source and "'s disk" in source, source
        everything_is_lost(bench.ready())


# --- canaries ------------------------------------------------------------------------------------------------------------


def test_the_step_after_a_checkpoint_is_noted_in_the_record_and_on_disk() -> None:
    bench = saved(5)
    assert bench.record.checkpoint and bench.record.checkpoint.after == an_answer(6).losses
    (noted,) = (effect.checkpoint for effect in bench.record.outbox.values() if isinstance(effect, NoteCheckpoint))
    assert noted == bench.record.checkpoint


def test_what_passed_before_the_checkpoint_was_committed_is_not_forgotten() -> None:
    spec = a_spec(tp=2)
    bench = Bench(spec=replace(spec, checkpoint=replace(spec.checkpoint, every=5))).running()
    bench.passed(1, 2, 3, 4, 5, 6, 7).checkpoint(5)
    assert bench.record.checkpoint and bench.record.checkpoint.after == an_answer(6).losses
    assert not bench.record.after
    assert [effect for effect in bench.record.outbox.values() if isinstance(effect, NoteCheckpoint)]


def test_a_first_step_like_the_recorded_one_proves_the_checkpoint() -> None:
    bench = everything_is_lost(saved(5))
    assert restored_step(bench) == 5
    bench.ready().passed(6, 7)
    assert bench.record.checkpoint and bench.record.checkpoint.is_proven and bench.record.canary is None
    assert bench.record.committed == 7


def test_a_first_step_that_differs_does_not_count_and_the_older_checkpoint_is_next() -> None:
    bench = everything_is_lost(saved(5, 10))
    assert restored_step(bench) == 10
    passes_differently(bench.ready(), 11)
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.CHECKPOINT
    assert bench.record.committed == 10, "what it gave is nobody's step"
    bench.passed(12, 13, node=NODES[0], generation=bench.record.void)
    assert bench.record.committed == 10, "nor are those after it"
    all_report(bench, step=11)
    assert restored_step(bench) == 5, "memory that was filled from the bad one is no source"
    bench.ready().passed(6, 7)
    assert bench.record.committed == 7 and bench.record.checkpoint and bench.record.checkpoint.is_proven
    assert "checkpoint_distrusted" in bench.said_to_people()


def test_the_first_step_may_be_known_only_from_reports() -> None:
    bench = everything_is_lost(saved(5, 10)).ready()
    victim = bench.device(0)
    bench.exited(victim)
    assert isinstance(bench.state, Reforming)
    generation = bench.state.closing.generation
    other = replace(an_answer(11), losses=tuple(loss - 0.5 for loss in an_answer(11).losses))
    bench.all_report(
        lambda device: replace(a_report(device, generation=generation, voted=11, passed=11, held=11), answer=other)
    )
    bench.planned().prepared()
    assert restored_step(bench) == 5 and bench.record.committed == 5


def test_memory_filled_from_a_checkpoint_is_on_trial_like_the_checkpoint() -> None:
    bench = everything_is_lost(saved(5, 10)).ready()
    bench.exited(bench.device(0))
    all_report(bench, step=10, passed=0)
    assert isinstance(bench.form().restore, FromMemory)
    all_report(passes_differently(bench.ready(), 11), step=11)
    assert restored_step(bench) == 5


def test_two_in_a_row_that_differ_end_the_job_with_a_verdict() -> None:
    bench = everything_is_lost(saved(5, 10, 15))
    all_report(passes_differently(bench.ready(), 16), step=16)
    passes_differently(bench.ready(), 11)
    assert isinstance(bench.state, Stopping) and isinstance(bench.state.outcome, Failed)
    assert "2 times in a row" in bench.state.outcome.message


@pytest.mark.parametrize(
    ("bits", "gap", "differs"),
    [("tp2", 0.0, False), ("tp2", 1e-7, True), ("tp1", 1e-7, False), ("tp1", 1e-3, True), ("tp1", float("nan"), True)],
)
def test_losses_are_equal_to_the_bit_where_they_have_to_be(bits: str, gap: float, differs: bool) -> None:
    checkpoint = replace(a_checkpoint(5), after=(2.0, 3.0), bits="tp2")
    assert bool(difference(checkpoint, (2.0, 3.0 + gap), bits, "fp32")) is differs


@pytest.mark.parametrize(("gap", "differs"), [(5e-3, False), (3e-2, True), (float("inf"), True)])
def test_bf16_elsewhere_may_differ_by_what_its_rounding_does(gap: float, differs: bool) -> None:
    checkpoint = replace(a_checkpoint(5), after=(1.0,), bits="tp2")
    assert bool(difference(checkpoint, (1.0 + gap,), "tp1", "bf16")) is differs
    assert difference(checkpoint, (1.0 + gap,), "tp2", "bf16"), "on the same kind and tp it is equal to the bit"


def test_nothing_recorded_is_nothing_to_compare_with() -> None:
    assert not difference(replace(a_checkpoint(5), after=()), (1.0,), "", "fp32")


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_read_is_followed_by_the_one_before() -> None:
    bench = unreadable(everything_is_lost(saved(5, 10)).ready(), 10)
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.CHECKPOINT
    assert "bad hash" in bench.state.fault.message
    all_report(bench, step=None)
    assert restored_step(bench) == 5
    assert isinstance(bench.ready().state, Running)


def test_without_another_one_training_begins_again() -> None:
    bench = unreadable(everything_is_lost(saved(5)).ready(), 5)
    all_report(bench, step=None)
    assert isinstance(bench.form().restore, FromSeed) and bench.record.committed == 0


def test_storage_that_is_away_says_nothing_against_a_checkpoint_and_is_waited_for() -> None:
    """Else a mount that is missing for a minute would cost every checkpoint there is, and all that was trained."""
    bench = everything_is_lost(saved(5, 10))
    for _ in range(TRIES):
        all_report(unreadable(bench.ready(), 10, is_away=True), step=None)
        assert restored_step(bench) == 10
    all_report(unreadable(bench.ready(), 10, is_away=True), step=None)
    assert "resting" in bench.said_to_people() and not bench.calls(FormGeneration)
    ((key, seconds),) = [(k, s) for k, s in deadlines(bench.record).items() if k.startswith("rest:")]
    assert seconds == REST_S
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert restored_step(bench) == 10 and "checkpoint_distrusted" not in bench.said_to_people()
    bench.ready().passed(11, 12)
    assert bench.record.committed == 12 and bench.record.checkpoint and bench.record.checkpoint.is_proven
    assert [one.step for one in bench.record.older] == [5] and not bench.record.failures


def test_storage_that_does_not_come_back_ends_the_job_and_leaves_its_checkpoints() -> None:
    bench = saved(5, 10)
    everything_is_lost(bench)
    for _ in range(bench.record.spec.recovery.max_external_attempts + 2):
        unreadable(bench.ready(), 10, is_away=True)
        if isinstance(bench.state, Stopping):
            break
        all_report(bench, step=None)
        for key in [key for key in deadlines(bench.record) if key.startswith("rest:")]:
            bench.tell(DeadlinePassed(job=JOB, key=key))
    assert isinstance(bench.state, Stopping) and isinstance(bench.state.outcome, Failed)
    assert "the checkpoint of step 10 cannot be reached from n1: bad hash" in bench.state.outcome.message
    assert bench.record.checkpoint is not None and bench.record.checkpoint.step == 10
