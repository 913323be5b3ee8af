"""What a simulated host sees of its ranks, and when it says that one stands still: the real lookout's rules, in short.

It knows who is frozen and who hangs, as a real one finds out from /proc and progress pages; it tells no more than those do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestrator.domain.host_events import HostEvent, RanksSeen, RanksStalled
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.requests import LookAround
from orchestrator.domain.sight import Phase, RankSight

from .place import Place
from .rank import SimRank

LOOK_S = 0.2
STOPPED_S, HUNG_S, WAIT_S = 0.4, 1.5, 1.0


class Watched(Protocol):
    """A host, as far as who looks at its ranks knows it."""

    @property
    def place(self) -> Place: ...
    @property
    def ranks(self) -> dict[Device, SimRank]: ...
    @property
    def at_work(self) -> Generation: ...
    @property
    def is_gone(self) -> bool: ...
    @property
    def frozen(self) -> bool: ...


class SimLookout:
    def __init__(self, host: Watched, say: Callable[[HostEvent], None]) -> None:
        self._host = host
        self._say = say
        self._since: dict[Device, tuple[str, float]] = {}
        """Each rank's mark, and since when it has had it."""
        self._told_s: dict[Device, float] = {}
        self._blamed: set[tuple[int, str]] = set()
        """Process and mark of whom anything was ever held against."""
        host.place.clock.after(LOOK_S, self._watch)

    def sight(self, rank: SimRank) -> RankSight:
        arena = rank.arena
        is_at_it = arena is not None and not rank.finished
        phase = Phase.IDLE if not is_at_it else Phase.COMPUTE if arena and arena.stage else Phase.FORM
        in_wait = arena is not None and is_at_it and (not arena.stage or rank.device in arena.done)
        still_s = self._still_s(rank)
        is_stopped = rank.frozen and still_s >= STOPPED_S
        waits_for_orders = phase is Phase.IDLE and rank.session_of == self._host.at_work
        is_guilty = not waits_for_orders and (is_stopped or (rank.hung and not in_wait and still_s >= HUNG_S))
        sight = RankSight(
            device=rank.device,
            generation=rank.session_of,
            phase=phase,
            step=Step(rank.memory.step + 1 if rank.memory else 0),
            still_s=still_s,
            in_wait=in_wait,
            group="everybody",
            collective=arena.stage * 2 + in_wait if arena else 0,
            traffic=arena.traffic(rank.device) if arena and in_wait else {},
            is_stopped=is_stopped,
            is_guilty=is_guilty,
            why="is strange" if is_guilty else "has waited" if in_wait and still_s >= WAIT_S else "",
        )
        if is_guilty:
            self._blamed.add((rank.pid, sight.mark))
        return sight

    def has_blamed(self, rank: SimRank, mark: str) -> bool:
        """Whether anything was ever held against it where it stood then."""
        return (rank.pid, mark) in self._blamed

    def answer(self, asked: LookAround) -> RanksSeen:
        return RanksSeen(generation=asked.generation, number=asked.number, sights=self._sights())

    def cry(self) -> None:
        """For no reason."""
        if self._host.at_work:
            self._alarm("a mistake")

    def _watch(self) -> None:
        host = self._host
        if host.is_gone:
            return
        host.place.clock.after(LOOK_S, self._watch)
        if host.frozen or not host.at_work:
            return
        news = [str(rank.device) for rank in self._watched() if self._is_news(rank)]
        if news:
            self._alarm(f"{', '.join(news)} stand still")

    def _is_news(self, rank: SimRank) -> bool:
        mark, now = self._mark(rank), self._host.place.clock.now
        if self._since.get(rank.device, ("", 0.0))[0] != mark:
            self._since[rank.device] = mark, now
            self._told_s.pop(rank.device, None)
            return False
        sight = self.sight(rank)
        if not sight.why or sight.still_s < 2 * self._told_s.get(rank.device, 0.0):
            return False
        self._told_s[rank.device] = sight.still_s
        return True

    def _still_s(self, rank: SimRank) -> float:
        mark, since = self._since.get(rank.device, ("", 0.0))
        return self._host.place.clock.now - since if mark == self._mark(rank) else 0.0

    def _mark(self, rank: SimRank) -> str:
        arena = rank.arena
        return f"{rank.pid} {rank.session_of} {arena.stage if arena else -1} {bool(arena and rank.device in arena.done)}"

    def _watched(self) -> list[SimRank]:
        return [rank for _, rank in sorted(self._host.ranks.items()) if rank.alive and rank.born <= self._host.at_work]

    def _sights(self) -> tuple[RankSight, ...]:
        return tuple(self.sight(rank) for rank in self._watched())

    def _alarm(self, why: str) -> None:
        self._say(RanksStalled(generation=self._host.at_work, sights=self._sights(), why=why))
