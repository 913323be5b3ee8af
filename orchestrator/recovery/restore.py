"""Where the next generation's state comes from: the living memory that holds everything, else the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.generation import Answer, Settlement
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Interval, Profile
from orchestrator.domain.protocol import FromCheckpoint, FromMemory, FromSeed, Restore


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    restore: Restore
    step: Step
    """Training goes on at step + 1."""
    moved_elements: int
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
    """usable: devices whose process still lives and can send. Everything is restored from one step or not at all."""
    if settlement.is_distrusted:
        return cold_restore(checkpoint, why=f"an owner and its mirror disagree about step {settlement.step}; ")
    layouts = {g: layout(plans[g], profile, mirrors=mirrors) for _, g in settlement.holders if g in plans}
    sources: dict[Device, tuple[Interval, ...]] = {
        device: layouts[generation].held(device)
        for device, generation in settlement.holders
        if device in usable and generation in layouts
    }
    arrived = {device: intervals for device, intervals in settlement.arrived if device in usable}
    found = transfers(sources, layout(target, profile, mirrors=mirrors), arrived)
    if not found.missing and (sources or arrived):
        moves = tuple(move for move in found.moves if move.source != move.target)
        return RestorePlan(
            restore=FromMemory(step=settlement.step, answer=settlement.answer, moves=moves),
            step=settlement.step,
            moved_elements=sum(len(move.interval) for move in moves),
            reason=f"{len({*sources, *arrived})} living ranks that hold every interval of step {settlement.step}",
            answer=settlement.answer,
        )
    lost = sum(len(interval) for interval in found.missing)
    at = settlement.step
    return cold_restore(checkpoint, why=f"{lost} elements of step {at} are in nobody's memory; " if lost and at else "")


def cold_restore(checkpoint: CheckpointRef | None, *, why: str = "") -> RestorePlan:
    """From the newest checkpoint, or from the seed where there is none yet. why: a clause before that, for people."""
    if checkpoint is not None:
        return RestorePlan(
            restore=FromCheckpoint(checkpoint=checkpoint),
            step=checkpoint.step,
            moved_elements=0,
            reason=f"{why}from the checkpoint of step {checkpoint.step}",
            answer=checkpoint.answer,
        )
    return RestorePlan(restore=FromSeed(), step=Step(0), moved_elements=0, reason=f"{why}from the seed")
