"""One rank's place among the others, read from a plan: its groups, its partners, and whom it must be connected to.

        pipeline 0            pipeline 1
      stage 0  stage 1      stage 0  stage 1
      ┌─────┐  ┌─────┐      ┌─────┐  ┌─────┐     tp: a column of one stage       (p, s, *)
 t 0  │  0 ─┼──┼─ 2  │      │  4 ─┼──┼─ 6  │     pp: along one pipeline          (p, *, t)
 t 1  │  1  │  │  3  │      │  5  │  │  7  │     across: between the pipelines   (*, s, t), for the vote
      └─────┘  └─────┘      └─────┘  └─────┘     buckets: whoever uses the same lines

Pure: every rank derives the same channels from the same plan, so nobody has to agree on anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.domain.ids import Device, JobId, Rank
from orchestrator.domain.layout import Move, buckets, partners
from orchestrator.domain.plan import Plan, Seat
from orchestrator.domain.profile import Profile

from .forming import COOKIE_BYTES

EXCHANGE, STORE, WORLD = 0, 1, 2
"""Channels below those of the groups."""


@dataclass(frozen=True, slots=True)
class Circle:
    """A group this rank belongs to, not yet connected."""

    name: str
    channel: int
    members: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """across: with pipelines of one depth the same (stage, tp) of each, else their first stages; None where not in it."""

    tp: Circle
    pp: Circle
    across: Circle | None
    buckets: tuple[Circle, ...]
    even: bool
    """All pipelines have the same depth."""
    mirror_of: Rank | None
    mirrored: Rank | None
    peers: frozenset[Rank]


def ranks_of(plan: Plan, donors: tuple[Device, ...] = ()) -> dict[Device, Rank]:
    """Members' ranks, then those of survivors without a seat that give what they hold."""
    members = {device: seat.rank for device, seat in plan.seat_of.items()}
    return members | {device: Rank(plan.world_size + place) for place, device in enumerate(donors)}


def job_cookie(job: JobId) -> bytes:
    """Names the job in every hello, so that two jobs' ranks never take each other for peers."""
    return hashlib.blake2s(job.encode(), digest_size=COOKIE_BYTES).digest()


def mesh(
    plan: Plan,
    profile: Profile,
    seat: Seat,
    *,
    mirrors: int,
    moves: Iterable[Move] = (),
    donors: tuple[Device, ...] = (),
) -> Mesh:
    """What the rank in `seat` sees. mirrors: 0 or 1; moves: the transfers this generation starts with."""
    me = seat.rank
    tp, pp, across, shared = _circles(plan, profile)
    partner = partners(plan) if mirrors else {}
    rank_of = ranks_of(plan, donors)
    mirror_of = next((rank_of[mirror] for owner, mirror in partner.items() if owner == seat.device), None)
    mirrored = next((rank_of[owner] for owner, mirror in partner.items() if mirror == seat.device), None)
    mine = Mesh(
        tp=next(circle for circle in tp if me in circle.members),
        pp=next(circle for circle in pp if me in circle.members),
        across=next((circle for circle in across if me in circle.members), None),
        buckets=tuple(circle for circle in shared if me in circle.members),
        even=len({len(pipeline.stages) for pipeline in plan.pipelines}) == 1,
        mirror_of=mirror_of,
        mirrored=mirrored,
        peers=frozenset(),
    )
    peers = {rank for circle in (mine.tp, mine.pp, mine.across, *mine.buckets) if circle for rank in circle.members}
    peers |= {rank for rank in (mirror_of, mirrored) if rank is not None}
    for move in moves:
        if move.source == seat.device:
            peers.add(rank_of[move.target])
        elif move.target == seat.device:
            peers.add(rank_of[move.source])
    return Mesh(
        tp=mine.tp,
        pp=mine.pp,
        across=mine.across,
        buckets=mine.buckets,
        even=mine.even,
        mirror_of=mirror_of,
        mirrored=mirrored,
        peers=frozenset(peers - {me}),
    )


def _circles(plan: Plan, profile: Profile) -> tuple[list[Circle], list[Circle], list[Circle], list[Circle]]:
    """Every group of the plan: tp, pp, across, buckets; numbered in this order."""
    depths = [len(pipeline.stages) for pipeline in plan.pipelines]
    at = plan.rank_at
    tps = [tuple(at[p, s, t] for t in range(plan.tp)) for p, depth in enumerate(depths) for s in range(depth)]
    pps = [tuple(at[p, s, t] for s in range(depth)) for p, depth in enumerate(depths) for t in range(plan.tp)]
    stages = range(depths[0]) if len(set(depths)) == 1 else range(1)
    acrosses = [tuple(at[p, s, t] for p in range(plan.dp)) for s in stages for t in range(plan.tp)]
    shared = list(dict.fromkeys(bucket.members for bucket in buckets(plan, profile)))
    made: list[list[Circle]] = []
    channel = WORLD + 1
    for name, groups in (("tp", tps), ("pp", pps), ("vote", acrosses), ("reduce", shared)):
        circles = []
        for members in groups:
            label = f"{name}[{','.join(map(str, members))}]"
            circles.append(Circle(label, channel, members))
            channel += 1
        made.append(circles)
    return made[0], made[1], made[2], made[3]
