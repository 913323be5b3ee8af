"""The kernel and a job's journal: entries are committed in order, and where one is lacking a base is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.checkpoint import CheckpointRef, Pacing, ShardRef
from orchestrator.domain.effects import CallHost, CommitCheckpoint, NoteCheckpoint, PruneCheckpoints
from orchestrator.domain.events import CheckpointCommitted, CheckpointFailed, EffectDone
from orchestrator.domain.generation import Unreadable
from orchestrator.domain.host_events import ShardNotSaved, ShardSaved
from orchestrator.domain.ids import Generation, NodeId, Step
from orchestrator.domain.origin import FromCheckpoint
from orchestrator.domain.requests import SaveSoon, SetPacing
from orchestrator.domain.spec import CheckpointSpec
from orchestrator.domain.state import Reforming, Running
from orchestrator.recovery.retention import kept
from orchestrator.supervisor.keeping import AGAIN, BEHIND
from tests.builders import JOB, Bench, a_report, a_spec, an_answer

NODES = tuple(NodeId(f"n{number}") for number in range(4))


def a_bench(policy: str = "journal", every: int | str = 32, keep_last: int = 2) -> Bench:
    spec = a_spec(tp=2)
    checkpoint = CheckpointSpec(policy=policy, every=every, keep_last=keep_last)  # type: ignore[arg-type]
    return Bench(spec=replace(spec, checkpoint=checkpoint, train=replace(spec.train, steps=1000))).running()


def handed_over(bench: Bench, step: int, kind: str = "journal", write_s: float = 0.0, stall_s: float = 0.0) -> Bench:
    """Every part of it is durable."""
    for device in bench.plan.devices:
        shard = ShardRef(
            device=device,
            index=f"{step}-{device}",
            sha256="0",
            kind=kind,
            write_s=write_s,
            stall_s=stall_s,  # type: ignore[arg-type]
        )
        bench.said(device.node, ShardSaved(generation=bench.record.generation, step=Step(step), shard=shard))
    return bench


def under_way(bench: Bench) -> list[int]:
    return [int(one.step) for one in bench.record.outbox.values() if isinstance(one, CommitCheckpoint)]


def committed(bench: Bench, *steps: int) -> Bench:
    """What is under way is written, one after the other."""
    for step in steps:
        number, commit = next(
            (number, one)
            for number, one in bench.record.outbox.items()
            if isinstance(one, CommitCheckpoint) and one.step == step
        )
        newest = bench.record.checkpoint
        kind = commit.shards[0].kind
        depth = newest.depth + 1 if newest is not None and kind == "journal" else 0
        ref = CheckpointRef(
            step=Step(step),
            generation=commit.generation,
            path=f"/shared/{step}.g{commit.generation}",
            answer=an_answer(step),
            kind=kind,
            depth=depth,
        )
        bench.tell(CheckpointCommitted(job=JOB, checkpoint=ref), EffectDone(job=JOB, effect=number))
    return bench


def failed(bench: Bench, step: int) -> Bench:
    number = next(n for n, one in bench.record.outbox.items() if isinstance(one, CommitCheckpoint) and one.step == step)
    return bench.tell(CheckpointFailed(job=JOB, step=Step(step), message="odd"), EffectDone(job=JOB, effect=number))


def a_chain(bench: Bench, base: int, last: int) -> Bench:
    """A base and the entries up to `last`, all committed."""
    for step in range(bench.record.committed + 1, last + 1):
        bench.passed(step)
    for step in range(base, last + 1):
        committed(handed_over(bench, step, "base" if step == base else "journal"), step)
    return bench


def known(bench: Bench) -> list[int]:
    newest = bench.record.checkpoint
    return [int(one.step) for one in ((newest, *bench.record.older) if newest else ())]


def test_an_entry_is_committed_after_what_it_goes_on_from_and_not_before() -> None:
    bench = a_bench().passed(1, 2, 3)
    for step in (1, 2, 3):
        handed_over(bench, step, "base" if step == 1 else "journal")
    assert under_way(bench) == [1]
    committed(bench, 1)
    assert under_way(bench) == [2]
    committed(bench, 2, 3)
    assert known(bench) == [3, 2, 1] and bench.record.checkpoint and bench.record.checkpoint.depth == 2


def test_nothing_is_committed_before_its_step_is() -> None:
    bench = handed_over(a_chain(a_bench(), 1, 3), 4)
    assert under_way(bench) == []
    assert under_way(bench.passed(4)) == [4]


def test_where_an_entry_cannot_be_committed_a_base_is_asked_for_and_the_next_entries_are_nothing() -> None:
    bench = a_chain(a_bench(), 1, 3).passed(4, 5, 6, 7)
    failed(handed_over(bench, 4), 4)
    ((_, order),) = bench.calls(SaveSoon)
    assert order.device == bench.device(0)
    handed_over(bench, 5)
    assert under_way(bench) == [] and not bench.record.saving
    handed_over(bench, 6, "base")
    handed_over(bench, 7)
    committed(bench, 6, 7)
    assert known(bench)[:2] == [7, 6] and bench.record.adrift is None
    assert bench.said_to_people().count("checkpoint_failed") == 1


def test_a_part_that_was_not_written_cuts_the_chain_there() -> None:
    bench = a_chain(a_bench(), 1, 3).passed(4, 5)
    event = ShardNotSaved(device=bench.device(1), generation=Generation(1), step=Step(4), message="the disk is full")
    bench.said(bench.device(1).node, event)
    assert len(bench.calls(SaveSoon)) == 1
    handed_over(bench, 5)
    assert under_way(bench) == [] and not bench.record.saving
    for step in range(6, 6 + AGAIN - 4):
        bench.passed(step).said(bench.device(1).node, replace(event, step=Step(step)))
        assert not bench.calls(SaveSoon)
    assert bench.said_to_people().count("checkpoint_failed") == 1, "one full disk is said once, for a while"


def test_ranks_that_had_no_room_know_by_themselves_that_a_base_is_next() -> None:
    bench = a_chain(a_bench(), 1, 3).passed(4)
    event = ShardNotSaved(device=bench.device(0), generation=Generation(1), step=Step(4), message="full", is_skipped=True)
    assert not bench.said(bench.device(0).node, event).calls(SaveSoon)


def test_commits_that_fall_behind_are_given_up_for_a_base() -> None:
    bench = a_bench().passed(*range(1, BEHIND + 4))
    handed_over(bench, 1, "base")
    for step in range(2, BEHIND + 2):
        handed_over(bench, step)
    assert len(bench.record.saving) == BEHIND
    handed_over(bench, BEHIND + 2)
    assert len(bench.record.saving) == BEHIND and bench.record.adrift == BEHIND + 2
    committed(bench, *range(1, BEHIND + 2))
    assert known(bench)[0] == BEHIND + 1


def test_a_base_waits_for_the_entry_that_is_being_committed_and_overtakes_those_that_are_not() -> None:
    bench = a_chain(a_bench(), 1, 2).passed(3, 4, 5)
    handed_over(bench, 3)
    handed_over(bench, 4)
    handed_over(bench, 5, "base")
    assert under_way(bench) == [3]
    committed(bench, 3)
    assert under_way(bench) == [5] and not bench.record.saving


# --- what is kept ---------------------------------------------------------------------------------------------------------


def test_an_entry_keeps_what_it_is_read_through_until_it_goes_itself() -> None:
    bench = a_chain(a_chain(a_bench(), 1, 5), 6, 6)
    assert known(bench) == [6, 5, 4, 3, 2, 1], "two are asked for: a base, and the entry before it with all of its chain"
    committed(handed_over(bench.passed(7), 7), 7)
    assert known(bench) == [7, 6]
    prunes = [[int(one.step) for one in e.keep] for e in bench.record.outbox.values() if isinstance(e, PruneCheckpoints)]
    assert prunes == [[1], [6, 5, 4, 3, 2, 1], [7, 6]], "the disk is told where something goes, not with every entry"


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ({"keep_last": 1}, [9, 8]),
        ({"keep_last": 3}, [9, 8, 5, 4, 3, 2]),
        ({"keep_last": 1, "keep_best": 1}, [9, 8, 4, 3, 2]),
        ({"keep_last": 1, "keep_every": 3}, [9, 8, 3, 2]),
    ],
)
def test_what_a_policy_keeps_of_a_journal_is_kept_with_its_chain(policy: dict[str, int], wanted: list[int]) -> None:
    def one(step: int, depth: int, loss: float) -> CheckpointRef:
        answer = replace(an_answer(step), losses=(loss,))
        return CheckpointRef(step=Step(step), generation=Generation(1), path=f"/{step}", answer=answer, depth=depth)

    chains = [one(9, 1, 2.0), one(8, 0, 2.0), one(5, 3, 2.0), one(4, 2, 1.0), one(3, 1, 2.0), one(2, 0, 2.0)]
    found = kept(chains, CheckpointSpec(**policy))
    assert [int(one.step) for one in found] == wanted


def test_the_step_after_an_entry_is_known_to_the_record_and_costs_the_disk_nothing() -> None:
    bench = a_chain(a_bench(), 1, 3).passed(4)
    assert bench.record.checkpoint and bench.record.checkpoint.after == an_answer(4).losses
    assert bench.record.older[0].after == an_answer(3).losses
    noted = [one.checkpoint.step for one in bench.record.outbox.values() if isinstance(one, NoteCheckpoint)]
    assert noted == [1]


# --- on the way back ------------------------------------------------------------------------------------------------------


def everything_is_lost(bench: Bench) -> Bench:
    for node in NODES:
        bench.host_gone(node)
    return bench.planned().opened().prepared()


def restored_step(bench: Bench) -> int:
    restore = bench.form().restore
    assert isinstance(restore, FromCheckpoint)
    return restore.checkpoint.step


def test_with_everything_lost_the_newest_entry_is_restored_and_the_new_generation_keeps_the_pace() -> None:
    bench = everything_is_lost(a_chain(a_bench(), 1, 6).passed(7))
    assert restored_step(bench) == 6 and bench.form().pacing == Pacing(every=32, is_journal=True)
    bench.ready().passed(7)
    assert isinstance(bench.state, Running) and bench.record.checkpoint and bench.record.checkpoint.is_proven


def test_a_bad_link_costs_what_is_read_through_it_and_no_more() -> None:
    bench = everything_is_lost(a_chain(a_bench(), 1, 8).passed(9)).ready()
    report = a_report(bench.device(1), generation=bench.record.generation, held=None)
    found = Unreadable(step=Step(8), generation=Generation(1), since=Step(5))
    bench.reports(replace(report, found=found, cause="bad hash"))
    state = bench.state
    assert isinstance(state, Reforming)
    generation = state.closing.generation
    bench.all_report(lambda device: a_report(device, generation=generation, voted=0, held=None)).planned().prepared()
    assert restored_step(bench) == 4 and known(bench) == [4, 3, 2, 1]


# --- how often ------------------------------------------------------------------------------------------------------------


def measured(bench: Bench, *, step_s: float, stall_s: float, write_s: float, bases: int = 3) -> Bench:
    """So many whole states have been saved, each three steps after the last, which took so long."""
    for _ in range(bases):
        for _ in range(3):
            bench.now += step_s
            bench.passed(bench.record.committed + 1)
        step = bench.record.committed
        handed_over(bench, step, "base", write_s=write_s, stall_s=stall_s)
        committed(bench, step)
    return bench


def test_long_steps_and_cheap_gradients_make_a_journal_worth_it_and_the_ranks_are_told() -> None:
    bench = measured(a_bench("auto", "auto"), step_s=60.0, stall_s=0.01, write_s=2.0)
    pacing = bench.record.pacing
    assert pacing is not None and pacing.is_journal
    calls = [effect.request for effect in bench.record.outbox.values() if isinstance(effect, CallHost)]
    orders = [request for request in calls if isinstance(request, SetPacing)]
    assert [order.pacing for order in orders] == [pacing] and orders[0].device == bench.device(0)
    (said,) = [entry for entry in bench.history if entry.type == "checkpoint_pace"]
    assert "instead of every 25 steps" in said.message and "would cost" in said.message


def test_what_the_file_says_is_kept_to() -> None:
    bench = measured(a_bench("full", 25), step_s=60.0, stall_s=0.01, write_s=2.0)
    assert bench.record.pacing is None and "checkpoint_pace" not in bench.said_to_people()
    bench = measured(a_bench("auto", 10), step_s=60.0, stall_s=0.01, write_s=2.0)
    assert bench.record.pacing in (None, Pacing(every=10, is_journal=True))


def test_a_pace_that_is_nearly_as_good_is_not_changed() -> None:
    bench = measured(a_bench("auto", "auto"), step_s=60.0, stall_s=0.01, write_s=2.0)
    before = bench.record.pacing
    measured(bench, step_s=60.0, stall_s=0.011, write_s=2.2, bases=5)
    assert bench.record.pacing == before and bench.said_to_people().count("checkpoint_pace") == 1
