"""What a simulated rank holds: intervals and the step they are at, in place of tensors. Wrong moves show as Violation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.domain.generation import Held
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.profile import Interval


class Violation(AssertionError):
    """A promise was broken: what and where, in one sentence."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit of one element that was flipped; every flip has a number of its own."""

    line: str
    at: int
    number: int

    def is_in(self, intervals: Iterable[Interval]) -> bool:
        return any(i.line == self.line and i.start <= self.at < i.stop for i in intervals)


@dataclass(slots=True)
class Memory:
    generation: Generation
    step: Step
    intervals: tuple[Interval, ...]
    wrong: frozenset[Flip] = frozenset()
    """Bits that are not what training made them; two memories with the same ones have the same bits."""

    @property
    def held(self) -> Held:
        return Held(generation=self.generation, step=self.step)

    def covers(self, wanted: Interval) -> bool:
        return not uncovered((wanted,), self.intervals)


def uncovered(wanted: Iterable[Interval], by: Iterable[Interval]) -> list[Interval]:
    """The pieces of `wanted` that no interval of `by` contains."""
    found: dict[str, list[Interval]] = defaultdict(list)
    for interval in sorted(by):
        found[interval.line].append(interval)
    left: list[Interval] = []
    for interval in wanted:
        position = interval.start
        for piece in found[interval.line]:
            if piece.start > position or position >= interval.stop:
                break
            position = max(position, piece.stop)
        if position < interval.stop:
            left.append(Interval(interval.line, position, interval.stop))
    return left


def check_filled(who: str, wanted: tuple[Interval, ...], held: Iterable[Interval], moved: Iterable[Interval]) -> None:
    """Every element of `wanted` is held already or arrives, and none of them twice. Raises Violation."""
    kept = [common for have in held for interval in wanted if (common := have.intersect(interval))]
    arrived = sorted([*kept, *moved])
    left = uncovered(wanted, arrived)
    if left:
        raise Violation(f"{who} is given no source for {left[0]}")
    if sum(map(len, arrived)) != sum(map(len, wanted)):
        raise Violation(f"{who} is filled with {sum(map(len, arrived))} elements where {sum(map(len, wanted))} belong")
