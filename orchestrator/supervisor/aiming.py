"""Whom a fault on purpose hits, and what speaks against it.

It owns the selectors, the seed's pick among those they match, and the limit of what mirrors cover. It refuses to know how a
fault is carried out and what becomes of it (faulting.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Set

from orchestrator.domain.faults import ON_RANKS, FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.plan import Plan, Seat
from orchestrator.domain.profile import Profile
from orchestrator.domain.state import Reforming

from .draft import Draft
from .forming import at_work

Holders = list[tuple[Device, Generation, Plan]]
"""Whose memory holds what the layout of its generation's plan gives it."""


DESTRUCTIVE = frozenset(
    {
        FaultKind.KILL,
        FaultKind.STOP,
        FaultKind.EXIT,
        FaultKind.RAISE,
        FaultKind.GIL_HANG,
        FaultKind.CUT_LINK,
        FaultKind.NODE_KILL,
        FaultKind.HOST_KILL,
        FaultKind.ZYGOTE_KILL,
    }
)
"""May cost what their victims hold in memory."""
COSTLY = DESTRUCTIVE | {FaultKind.BIT_FLIP}
"""Leave nothing behind that others may be rebuilt from. A flip that is copied before it is found is never found."""
PASSING = frozenset({FaultKind.STOP, FaultKind.GIL_HANG, FaultKind.CUT_LINK})
"""Over by themselves after a while, and then no danger any more."""


def matching(draft: Draft, asked: FaultRequested) -> list[Seat]:
    """Seats that the selectors of a fault leave."""
    at_it = at_work(draft)
    if at_it is None:
        return []
    wanted = {
        "rank": asked.rank, "device": asked.device, "pipeline": asked.pipeline, "stage": asked.stage, "tp": asked.tp
    }  # fmt: skip
    return [
        seat
        for seat in at_it[1].seats
        if all(value is None or getattr(seat, name) == value for name, value in wanted.items())
        and asked.node in (None, seat.device.node)
    ]


def victims(draft: Draft, asked: FaultRequested) -> tuple[Device, tuple[Device, ...]]:
    """The one the seed picks, and everybody who goes down with it."""
    at_it = at_work(draft)
    assert at_it is not None
    seat = _pick(asked.seed, sorted(matching(draft, asked), key=lambda seat: seat.rank))
    if asked.fault in ON_RANKS:
        return seat.device, (seat.device,)
    return seat.device, tuple(device for device in at_it[1].devices if device.node == seat.device.node)


def still_open(draft: Draft) -> tuple[Injected, ...]:
    """Faults without a verdict yet."""
    return tuple(one for one in draft.record.injected if one.verdict is Verdict.OPEN)


def objection(draft: Draft, asked: FaultRequested) -> str:
    """Why it may not be done to this job; empty where it may."""
    if not matching(draft, asked):
        return _nobody(draft, asked)
    _, devices = victims(draft, asked)
    open_ones = [one.asked.fault for one in still_open(draft) if _is_at_risk(draft, one)]
    is_flip = asked.fault is FaultKind.BIT_FLIP
    if asked.fault in COSTLY and not asked.beyond_mirrors and (FaultKind.BIT_FLIP in open_ones or (is_flip and open_ones)):
        return (
            "a flipped bit leaves one good copy of what it is in; wait until what was asked for before has its verdict, "
            "or ask beyond mirrors"
        )
    if asked.fault in COSTLY and not asked.beyond_mirrors and (lost := _last_copies(draft, devices)):
        return (
            f"with what is failing already it would destroy the only copies of {lost:,} elements of step "
            f"{draft.record.committed}; wait until mirrors are whole again, or ask beyond mirrors"
        )
    return ""


# --- whom ----------------------------------------------------------------------------------------------------------------


def _pick(seed: int, seats: list[Seat]) -> Seat:
    """The same seats and the same seed give the same one, in any process."""
    drawn = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")
    return seats[drawn % len(seats)]


def _nobody(draft: Draft, asked: FaultRequested) -> str:
    at_it = at_work(draft)
    if at_it is None:
        return "the job has no ranks at the moment; wait until it runs"
    return f"no rank of generation {at_it[0]} is meant by that; it has ranks 0..{at_it[1].world_size - 1}, see its plan"


# --- what it would destroy -----------------------------------------------------------------------------------------------


def _last_copies(draft: Draft, hit: tuple[Device, ...]) -> int:
    """Elements that nobody would hold any more if these and everybody else under attack lost their memory at once."""
    record, state = draft.record, draft.state
    if record.profile is None:
        return 0
    failing = {device for one in still_open(draft) if _is_at_risk(draft, one) for device in one.devices} | set(hit)
    if isinstance(state, Reforming):
        failing |= state.lost
    return max(_lost(holders, record.profile, record.spec.recovery.mirrors, failing) for holders in _holders(draft))


def _lost(holders: Holders, profile: Profile, mirrors: int, failing: Set[Device]) -> int:
    layouts = {g: layout(plan, profile, mirrors=mirrors) for g, plan in {g: plan for _, g, plan in holders}.items()}
    sources = {device: layouts[g].held(device) for device, g, _ in holders if device not in failing}
    found = transfers(sources, layouts[max(layouts)]) if layouts else None
    return sum(len(interval) for interval in found.missing) if found else 0


def _is_at_risk(draft: Draft, one: Injected) -> bool:
    """Whether its victims may still lose their memory because of it."""
    if one.asked.fault not in COSTLY:
        return False
    if one.asked.fault not in PASSING or one.carried_out_at is None or one.incident is not None:
        return True
    # The step under way may have had its vote already; the one after it has it too, so all have voted since.
    return draft.record.committed < one.step + 2


def _holders(draft: Draft) -> list[Holders]:
    """Whose memory counts: the running generation's, or that of the one being closed. Where the next was told to form its
    ranks may already have let go of what they held before, so that each of the two has to be enough.

    Of a job that starts the seed gives everything again, but by the time the fault strikes steps may be committed.
    """
    record, state = draft.record, draft.state
    at_it = at_work(draft)
    formed = [_everybody(*at_it)] if at_it is not None else []
    if not isinstance(state, Reforming):
        return formed
    generation, settlement = state.closing.generation, state.closing.settlement
    if settlement is not None:
        return [[(d, g, record.plans[g]) for d, g in settlement.holders if g in record.plans], *formed]
    plan = record.plans.get(generation)
    return [_everybody(generation, plan) if plan else [], *formed]


def _everybody(generation: Generation, plan: Plan) -> Holders:
    return [(device, generation, plan) for device in plan.devices]
