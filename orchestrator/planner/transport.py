"""Who should hold what after a change so that the least moves: a transport problem over roles, and senders that share
the load.

Devices in one role (a stage's layers) are alike, so it is about counts: how many groups that held old role i take new
role j. A group that held a role keeps the layers the two have in common; the most kept in all is the least moved.
Solved exactly by successive best augmenting paths on the few pairs that have layers in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
"""Layers first..last-1."""
RESOLUTION = 1 << 40
"""Of what a group keeps at most; smaller differences are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """pairs: (old role or None for who held nothing, new role) -> groups. moved: by weight, of all that is not kept."""

    pairs: Mapping[tuple[int | None, int], int]
    moved: float


def least_moves(old: Sequence[tuple[Span, int]], new: Sequence[tuple[Span, int]], weight: Sequence[float]) -> Moves:
    """old, new: (layers, groups) of each role. weight: prefix sums over layers of what a group holds of them."""

    def held(span: Span) -> float:
        return weight[span[1]] - weight[span[0]]

    kept = {
        (i, j): held((max(a[0], b[0]), min(a[1], b[1])))
        for i, (a, _) in enumerate(old)
        for j, (b, _) in enumerate(new)
        if min(a[1], b[1]) > max(a[0], b[0])
    }
    flow = _best_flow(kept, [count for _, count in old], [count for _, count in new])
    pairs: dict[tuple[int | None, int], int] = {pair: count for pair, count in sorted(flow.items()) if count}
    for j, (_, count) in enumerate(new):
        missing = count - sum(taken for (_, role), taken in flow.items() if role == j)
        if missing:
            pairs[None, j] = missing
    total = sum(held(span) * count for span, count in new)
    return Moves(pairs=pairs, moved=total - sum(kept[pair] * count for pair, count in flow.items()))


def _best_flow(kept: Mapping[tuple[int, int], float], supply: list[int], demand: list[int]) -> dict[tuple[int, int], int]:
    """The flow of most gain. Every augmenting path gains less than the one before, so it ends where none gains."""
    # In whole numbers: sums of fractions that should be equal are not, and a way round in a circle that seems to gain by
    # their last bit is walked for ever.
    largest = max(kept.values(), default=1.0)
    gain = {pair: round(value / largest * RESOLUTION) for pair, value in kept.items()}
    flow = dict.fromkeys(gain, 0)
    left, open_ = list(supply), list(demand)
    by_old: dict[int, list[int]] = {}
    by_new: dict[int, list[int]] = {}
    for i, j in gain:
        by_old.setdefault(i, []).append(j)
        by_new.setdefault(j, []).append(i)
    while True:
        best_old = {i: 0 for i, number in enumerate(left) if number and i in by_old}
        best_new: dict[int, int] = {}
        from_old: dict[int, int] = {}
        from_new: dict[int, int] = {}
        changed = list(best_old)
        while changed:
            reached: dict[int, None] = {}
            for i in changed:
                for j in by_old[i]:
                    value = best_old[i] + gain[i, j]
                    if j not in best_new or value > best_new[j]:
                        best_new[j], from_new[j] = value, i
                        reached[j] = None
            changed = []
            for j in reached:
                for i in by_new[j]:
                    value = best_new[j] - gain[i, j]
                    if flow[i, j] and (i not in best_old or value > best_old[i]):
                        best_old[i], from_old[i] = value, j
                        changed.append(i)
        ends = [(best_new[j], -j) for j in best_new if open_[j]]
        if not ends or max(ends)[0] <= 0:
            return flow
        j = -max(ends)[1]
        path: list[tuple[int, int, int]] = []
        end, amount = j, open_[j]
        while True:
            i = from_new[j]
            path.append((i, j, 1))
            if i not in from_old:
                break
            j = from_old[i]
            path.append((i, j, -1))
            amount = min(amount, flow[i, j])
        amount = min(amount, left[i])
        left[i] -= amount
        open_[end] -= amount
        for a, b, sign in path:
            flow[a, b] += sign * amount


def busiest_sender(old: Sequence[tuple[Span, int]], needed: Sequence[float]) -> float:
    """What the busiest group sends where each layer's bytes are asked of all groups that hold it alike. needed: by
    layer.
    """
    holders = [0] * len(needed)
    for (first, last), count in old:
        for layer in range(first, last):
            holders[layer] += count
    share = [need / number if number else 0.0 for need, number in zip(needed, holders, strict=True)]
    return max((sum(share[first:last]) for (first, last), count in old if count), default=0.0)
