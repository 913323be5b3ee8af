"""A simulated newcomer: it receives while others train, follows their steps once it has everything, and reports at the end.

What real sources send is taken from the arena they train in, so it has nothing that nobody could have sent. It refuses to
know when sources break off: chance says so.
"""

from __future__ import annotations

from orchestrator.domain.host_events import JoinerAt, JoinFailed
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.profile import Interval, joined
from orchestrator.domain.requests import BeginJoin

from .arena import Arena
from .rank import SimRank

COPY_S = (0.05, 4.0)
BREAKS_OFF = 0.15
"""How often a source does, on its side or on the way."""
LAGS = 0.1
"""How often what there is of the last step comes too late."""


def begin_join(rank: SimRank, arena: Arena | None, begin: BeginJoin) -> None:
    """arena: of the generation that trains on; None where nobody has ever formed it."""
    newcomer = rank.newcomer
    if isinstance(newcomer, Newcomer) and newcomer.generation == begin.generation:
        newcomer.expect(begin)
    elif arena is not None and begin.generation > max(rank.closed, rank.session_of):
        rank.newcomer = Newcomer(rank, arena, begin)


class Newcomer:
    def __init__(self, rank: SimRank, arena: Arena, begin: BeginJoin) -> None:
        self.rank = rank
        self.arena = arena
        self.of = begin.of
        self.generation = begin.generation
        self._waiting: set[tuple[int, Device]] = set()
        self._here: list[Interval] = []
        self._told = False
        self.expect(begin)

    def expect(self, begin: BeginJoin) -> None:
        mine = [move for move in begin.moves if move.target == self.rank.device]
        for source in sorted({move.source for move in mine}):
            self._waiting.add((begin.attempt, source))
            intervals = [move.interval for move in mine if move.source == source]
            if self.rank.host.place.rng.random() < BREAKS_OFF:
                self.rank.soon(*COPY_S, lambda source=source: self._broken_off(begin.attempt, source))  # type: ignore[misc]
            else:
                self.rank.soon(
                    *COPY_S,
                    lambda source=source, intervals=intervals: self._copied(begin.attempt, source, intervals),  # type: ignore[misc]
                )

    def _copied(self, attempt: int, source: Device, intervals: list[Interval]) -> None:
        if self.rank.newcomer is not self or self.arena.is_broken or source not in self.arena.here:
            return  # whoever trains has other worries; this is given up with it
        self._waiting.discard((attempt, source))
        self._here += intervals
        self._follow(self.arena.at)
        self.arena.followers[self.rank.device] = self._follow
        if not self._waiting and not self._told:
            self._told = True
            at = JoinerAt(device=self.rank.device, generation=self.generation, step=self.rank.arrived_at)
            self.rank.host.rank_says(self.rank, at)

    def _broken_off(self, attempt: int, source: Device) -> None:
        if self.rank.newcomer is self:
            said = JoinFailed(
                device=self.rank.device,
                generation=self.generation,
                source=source,
                attempt=attempt,
                message=f"{source} broke off",
            )
            self._waiting.discard((attempt, source))
            self.rank.host.rank_says(self.rank, said)

    def _follow(self, step: Step) -> None:
        """Every source has applied a step, and what it takes to do so here has come."""
        if (
            self.rank.alive
            and self.rank.newcomer is self
            and self.rank.host.place.rng.random() >= LAGS * self.arena.stopping
        ):
            self.rank.arrived = list(joined(self._here))
            self.rank.arrived_at = step
