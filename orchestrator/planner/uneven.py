"""Pipelines that fit memory only where those with more of it own more of the state: before anybody knows which devices they
are on, so mirrors count on the class that owns what they mirror. Placed plans are checked device by device (owning.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .compose import Member
from .memory import usable
from .pipelines import Bench
from .shares import Holder, spread

UNCOUNTED = 1 << 40
"""So many replicas that what each owns is nothing: compute copies and activations alone have to fit."""


def is_tight(bench: Bench, deepest: int) -> bool:
    """Whether who owns how much can make a difference."""
    return not all(bench.fits_whole(index, deepest) for index in range(len(bench.classes)))


def memory_of(bench: Bench, members: Sequence[Member]) -> dict[str, tuple[float, float]] | None:
    """Kind -> bytes of its fullest device and bytes it has, state shared out as it fits best; None where it does not."""
    rules = bench.rules
    each = rules.owned_bytes * (1 + rules.mirrors)
    stages = [(member, stage) for member in members for stage in range(member.track.depth)]
    bounds = sorted({bound for member in members for bound in member.track.bounds})
    beside = [bench.bytes_of(member.track, stage, member.ids[0], UNCOUNTED) for member, stage in stages]
    kinds = [bench.classes[member.track.classes[stage]].kind for member, stage in stages]
    holders = [
        Holder(
            first=bounds.index(member.track.bounds[stage]),
            last=bounds.index(member.track.bounds[stage + 1]),
            room=(usable(kind) - other) / each,
            rate=kind.memory_gb_s,
            count=len(member.ids),
        )
        for (member, stage), other, kind in zip(stages, beside, kinds, strict=True)
    ]
    if any(one.room < 0.0 for one in holders):
        return None
    taken = spread([bench.params[b] - bench.params[a] for a, b in pairwise(bounds)], holders)
    if taken is None:
        return None
    found: dict[str, tuple[float, float]] = {}
    for kind, other, mine in zip(kinds, beside, taken, strict=True):
        used = other + sum(mine) * each
        found[kind.name] = max(found.get(kind.name, (0.0, 0.0)), (used, float(kind.memory_bytes)))
    return dict(sorted(found.items()))
