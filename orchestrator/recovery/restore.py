"""Where the next generation's state comes from: for every interval of it one source, all of them of one step.

    own memory > a peer's (a mirror's among them) > the node's own disk > shared storage

The newest step wins for which every interval has a source. Memory is of one step, a checkpoint of another or of the same:
then both are used, each interval from the nearest. It owns the choice; what is read is proven by whoever reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.generation import Answer, Settlement
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.layout import Layout, layout, transfers
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed, Read, Restore
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Interval, Profile

SHARED = "shared storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    restore: Restore
    step: Step
    """Training goes on at step + 1."""
    moved_elements: int
    """Between devices."""
    reason: str
    answer: Answer | None = None
    """Of the vote on `step`, where it is known."""


def choose_restore(
    *,
    settlement: Settlement,
    plans: Mapping[Generation, Plan],
    usable: frozenset[Device],
    target: Plan,
    profile: Profile,
    mirrors: int,
    checkpoint: CheckpointRef | None,
) -> RestorePlan:
    """usable: devices whose process still lives and can send. checkpoint: the newest that is believed."""
    wanted = layout(target, profile, mirrors=mirrors)
    written_by = plans.get(checkpoint.generation) if checkpoint else None
    disks = Disks.of(checkpoint, written_by, profile)
    if settlement.is_distrusted:
        why = f"an owner and its mirror disagree about step {settlement.step}; "
        return cold_restore(checkpoint, why=why, wanted=wanted, disks=disks)
    held = sorted({generation for _, generation in settlement.holders})  # nearly always one, of thousands of holders
    layouts = {g: layout(plans[g], profile, mirrors=mirrors) for g in held if g in plans}
    sources: dict[Device, tuple[Interval, ...]] = {
        device: layouts[generation].held(device)
        for device, generation in settlement.holders
        if device in usable and generation in layouts
    }
    arrived = {device: intervals for device, intervals in settlement.arrived if device in usable}
    found = transfers(sources, wanted, arrived)
    lost = sum(len(interval) for interval in found.missing)
    reads = tuple(Read(interval, device) for device, interval in found.lacking)
    is_same = checkpoint is not None and is_state_of(checkpoint, settlement)
    if (sources or arrived) and (is_same or not lost):
        moves = tuple(move for move in found.moves if move.source != move.target)
        reason = f"{len({*sources, *arrived})} living ranks that hold every interval of step {settlement.step}"
        if lost:
            taken = Counter({"memory": len(found.moves)}) + disks.sources(reads)
            reason = f"step {settlement.step}: {_words(taken)}"
        return RestorePlan(
            restore=FromMemory(
                step=settlement.step,
                answer=settlement.answer,
                moves=moves,
                checkpoint=checkpoint if lost else None,
                reads=reads,
            ),
            step=settlement.step,
            moved_elements=sum(len(move.interval) for move in moves),
            reason=reason,
            answer=settlement.answer,
        )
    at = settlement.step
    why = f"{lost} elements of step {at} are in nobody's memory; " if lost and at else ""
    return cold_restore(checkpoint, why=why, wanted=wanted, disks=disks)


def cold_restore(
    checkpoint: CheckpointRef | None, *, why: str = "", wanted: Layout | None = None, disks: Disks | None = None
) -> RestorePlan:
    """From the newest checkpoint, or from the seed where there is none yet. why: a clause before that, for people.

    wanted, disks: what it is to fill and where it lies, where some of it lies on nodes' own disks.
    """
    if checkpoint is None:
        return RestorePlan(restore=FromSeed(), step=Step(0), moved_elements=0, reason=f"{why}from the seed")
    reason = f"{why}from the checkpoint of step {checkpoint.step}"
    if wanted is not None and disks is not None and disks.owners:
        reads = [Read(i, device) for device in sorted({*wanted.owned, *wanted.mirrored}) for i in wanted.held(device)]
        reason = f"{reason}: {_words(disks.sources(reads))}"
    return RestorePlan(
        restore=FromCheckpoint(checkpoint=checkpoint),
        step=checkpoint.step,
        moved_elements=0,
        reason=reason,
        answer=checkpoint.answer,
    )


def is_state_of(checkpoint: CheckpointRef, settlement: Settlement) -> bool:
    """Whether a checkpoint holds the very state that memory holds, to the bit: the state after one and the same vote.

    A step that was run again after a rollback, in another order of summation, has another answer: it carries the norm and
    every loss in full. In one generation a step is voted on once.
    """
    if checkpoint.step != settlement.step or not settlement.step:
        return False
    is_one_vote = checkpoint.answer is not None and checkpoint.answer == settlement.answer
    return is_one_vote or checkpoint.generation == settlement.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks:
    """Which intervals of a checkpoint lie on which node's own disk, beside shared storage, where they all lie."""

    owners: Mapping[str, tuple[tuple[Interval, NodeId], ...]]

    @staticmethod
    def of(checkpoint: CheckpointRef | None, plan: Plan | None, profile: Profile) -> Disks:
        """plan: of the generation that wrote it; None where nobody knows it any more."""
        owners: dict[str, tuple[tuple[Interval, NodeId], ...]] = {}
        if checkpoint is not None and checkpoint.local and plan is not None:
            for device, intervals in layout(plan, profile, mirrors=0).owned.items():
                for interval in intervals if device.node in checkpoint.local else ():
                    owners[interval.line] = (*owners.get(interval.line, ()), (interval, device.node))
        return Disks(owners=owners)

    def sources(self, reads: Iterable[Read]) -> Counter[str]:
        """Where each of these is read from, and how many from there: a device reads its own node's disk alone."""
        return Counter(self._source(read) for read in reads)

    def _source(self, read: Read) -> str:
        position, node = read.interval.start, read.target.node
        for interval, at in sorted(self.owners.get(read.interval.line, ())):
            if at == node and interval.start <= position < interval.stop:
                position = interval.stop
        return f"{node}'s disk" if position >= read.interval.stop else SHARED


def _words(taken: Mapping[str, int]) -> str:
    def rank(name: str) -> tuple[bool, bool, str]:
        return name != "memory", name == SHARED, name

    parts = [f"{taken[name]} interval{'s' * (taken[name] != 1)} from {name}" for name in sorted(taken, key=rank)]
    return ", ".join(parts)
