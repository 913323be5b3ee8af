"""Where the next generation's state comes from: memory where it is whole, else the checkpoint, else the seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.generation import Answer, Settlement
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.layout import layout
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed
from orchestrator.domain.profile import joined
from orchestrator.recovery.restore import RestorePlan, choose_restore, cold_restore
from tests.builders import a_device, a_plan, a_profile, an_answer

DEVICES = [a_device(node, index) for node in range(4) for index in range(2)]
PLAN = a_plan(DEVICES, tp=2, pp=2)
SPARE = a_plan([*DEVICES[:6], a_device(9, 0), a_device(9, 1)], tp=2, pp=2)
SMALLER = a_plan(DEVICES[:4], tp=2, pp=2)
ANSWER = Answer(step=Step(5), norm=1.0, losses=(1.0,), maxima=(0.5,))
CHECKPOINT = CheckpointRef(step=Step(5), generation=Generation(1), path="/shared/5", answer=ANSWER)
G = Generation(1)


def restore(
    alive: list[Device], target: object = PLAN, *, mirrors: int = 1, checkpoint: CheckpointRef | None = None
) -> RestorePlan:
    settlement = Settlement(
        generation=G, step=Step(7), answer=an_answer(7), holders=tuple((device, G) for device in DEVICES)
    )
    return choose_restore(
        settlement=settlement,
        plans={G: PLAN},
        usable=frozenset(alive),
        target=target,  # type: ignore[arg-type]
        profile=a_profile(),
        mirrors=mirrors,
        checkpoint=checkpoint,
    )


def test_everybody_alive_moves_nothing() -> None:
    found = restore(DEVICES)
    assert isinstance(found.restore, FromMemory) and found.step == 7 and found.moved_elements == 0
    assert found.restore.answer == an_answer(7)


@pytest.mark.parametrize("lost", range(8))
def test_any_one_rank_is_rebuilt_from_mirrors(lost: int) -> None:
    found = restore([device for device in DEVICES if device != DEVICES[lost]], checkpoint=CHECKPOINT)
    assert isinstance(found.restore, FromMemory) and found.step == 7
    assert found.moved_elements > 0
    assert all(move.source != DEVICES[lost] for move in found.restore.moves)


@pytest.mark.parametrize("node", range(4))
def test_any_one_node_is_replaced_by_a_spare_from_mirrors(node: int) -> None:
    alive = [device for device in DEVICES if device.node != f"n{node}"]
    target = a_plan([*alive, a_device(9, 0), a_device(9, 1)], tp=2, pp=2)
    found = restore(alive, target, checkpoint=CHECKPOINT)
    assert isinstance(found.restore, FromMemory) and found.step == 7


def test_survivors_without_a_seat_give_what_members_lack() -> None:
    found = restore(DEVICES[:6], SMALLER, checkpoint=CHECKPOINT)
    assert isinstance(found.restore, FromMemory)
    assert {move.source for move in found.restore.moves} - set(SMALLER.devices) <= set(DEVICES[4:6])


def test_owner_and_mirror_both_lost_fall_back_to_the_checkpoint_and_say_how_much() -> None:
    found = restore(DEVICES[4:], checkpoint=CHECKPOINT)
    assert found.restore == FromCheckpoint(checkpoint=CHECKPOINT) and found.step == 5
    assert "elements of step 7 are in nobody's memory" in found.reason


def test_without_mirrors_one_lost_rank_is_enough() -> None:
    assert restore(DEVICES[1:], mirrors=0, checkpoint=CHECKPOINT).restore == FromCheckpoint(checkpoint=CHECKPOINT)


def test_without_memory_and_checkpoint_the_seed_is_left() -> None:
    found = restore([])
    assert found.restore == FromSeed() and found.step == 0


def test_holders_of_a_plan_nobody_knows_any_more_are_no_source() -> None:
    settlement = Settlement(generation=G, step=Step(7), answer=None, holders=tuple((d, Generation(9)) for d in DEVICES))
    found = choose_restore(
        settlement=settlement,
        plans={G: PLAN},
        usable=frozenset(DEVICES),
        target=PLAN,
        profile=a_profile(),
        mirrors=1,
        checkpoint=None,
    )
    assert found.restore == FromSeed()


# --- memory and disk, of one state ----------------------------------------------------------------------------------------

SAME = CheckpointRef(step=Step(7), generation=G, path="/shared/7", answer=an_answer(7))
"""Right after the step that is settled, in the generation that ended."""


def test_what_memory_lacks_is_read_from_a_checkpoint_of_the_same_state_and_nothing_else_is() -> None:
    found = restore(DEVICES[4:], checkpoint=SAME)
    assert isinstance(found.restore, FromMemory) and (found.step, found.restore.checkpoint) == (7, SAME)
    before = layout(PLAN, a_profile(), mirrors=1)
    living = [interval for device in DEVICES[4:] for interval in before.held(device)]
    assert found.restore.reads and all(
        not any(have.intersect(read.interval) for have in living) for read in found.restore.reads
    )
    moved = [*found.restore.reads, *found.restore.moves]
    for device in PLAN.devices:
        got = [one.interval for one in moved if one.target == device]
        kept = before.held(device) if device in DEVICES[4:] else ()
        assert sorted(map(len, joined([*got, *kept]))) == sorted(map(len, joined(before.held(device))))
    assert found.reason.startswith("step 7: ") and "from memory" in found.reason
    assert f"{len(found.restore.reads)} intervals from shared storage" in found.reason


def test_a_checkpoint_of_the_same_step_but_of_another_run_of_it_is_not_mixed_with_memory() -> None:
    other = replace(SAME, generation=Generation(0), answer=replace(an_answer(7), norm=2.5))
    assert restore(DEVICES[4:], checkpoint=other).restore == FromCheckpoint(checkpoint=other)
    same = replace(SAME, generation=Generation(0))
    assert isinstance(restore(DEVICES[4:], checkpoint=same).restore, FromMemory), "one vote, whoever wrote it down"


def test_where_nobody_lives_all_is_read() -> None:
    assert restore([], checkpoint=SAME).restore == FromCheckpoint(checkpoint=SAME)


def test_whole_memory_needs_no_disk() -> None:
    found = restore(DEVICES[1:], checkpoint=SAME).restore
    assert isinstance(found, FromMemory) and (found.checkpoint, found.reads) == (None, ())


def test_a_device_reads_its_own_nodes_disk_where_that_has_all_of_an_interval() -> None:
    local = replace(SAME, local=(NodeId("n0"),))
    found = restore(DEVICES[4:], checkpoint=local)
    assert isinstance(found.restore, FromMemory)
    own = layout(PLAN, a_profile(), mirrors=0).owned
    near = [read for read in found.restore.reads if read.target.node == "n0" and read.interval in own[read.target]]
    assert near and f"{len(near)} intervals from n0's disk" in found.reason
    assert f"{len(found.restore.reads) - len(near)} intervals from shared storage" in found.reason
    older = restore(DEVICES[4:], checkpoint=replace(local, step=Step(5)))
    assert "from the checkpoint of step 5: " in older.reason and "from n0's disk" in older.reason


def test_cold_start_takes_the_newest_checkpoint() -> None:
    assert cold_restore(None).restore == FromSeed()
    assert cold_restore(CHECKPOINT).step == 5
    assert cold_restore(CHECKPOINT).answer == ANSWER, "with what the scale of step 6 is made of"
