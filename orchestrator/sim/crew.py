"""A simulated host's processes: forked where seats are prepared, told to leave, killed, and buried with what they knew.

It owns which process is on which device. It refuses to know terms, effects and silence: its host does.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import HostEvent, RankEnding, RankExited, SeatsPrepared
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.requests import PrepareSeats

from .rank import Home, SimRank


class SimCrew:
    """soon(low_s, high_s, do): as its host does things; leave_s: before who has not left a closed generation is killed."""

    def __init__(
        self,
        home: Home,
        say: Callable[[HostEvent], None],
        soon: Callable[[float, float, Callable[[], None]], None],
        leave_s: Callable[[], float],
    ) -> None:
        self._home = home
        self._say = say
        self._soon = soon
        self._leave_s = leave_s
        self.ranks: dict[Device, SimRank] = {}
        self.closed = Generation(0)
        self._preparing: list[PrepareSeats] = []

    # --- births -----------------------------------------------------------------------------------------------------------

    def prepare(self, request: PrepareSeats) -> None:
        for device in request.devices:
            if device not in self.ranks:
                self._fork(device, request.generation)
        self._preparing.append(request)
        self._answer_preparations()

    def _fork(self, device: Device, generation: Generation) -> None:
        def forked() -> None:
            if device not in self.ranks:
                rank = self.ranks[device] = SimRank(self._home, device, self._home.place.next_pid(), generation)
                if generation <= self.closed:
                    self._tell_to_leave(rank, generation)
            self._answer_preparations()

        self._soon(0.005, 0.03, forked)

    def _answer_preparations(self) -> None:
        for request in list(self._preparing):
            # The end of a device's last process is told before its successor is.
            if all(device in self.ranks and self.ranks[device].alive for device in request.devices):
                self._preparing.remove(request)
                ranks = {device: self.ranks[device] for device in request.devices}
                self._say(
                    SeatsPrepared(
                        generation=request.generation,
                        addresses={device: rank.address for device, rank in ranks.items()},
                        pids={device: rank.pid for device, rank in ranks.items()},
                    )
                )

    # --- leaving ----------------------------------------------------------------------------------------------------------

    def close(self, generation: Generation) -> None:
        self.closed = max(self.closed, generation)
        for _, rank in sorted(self.ranks.items()):
            if rank.born <= generation:
                self._tell_to_leave(rank, generation)

    def _tell_to_leave(self, rank: SimRank, generation: Generation) -> None:
        rank.soon(0.0005, 0.005, lambda: rank.close(generation))
        leave_s = self._leave_s()
        self._soon(leave_s, leave_s, lambda: self.kill(rank) if rank.reported < generation else None)

    # --- deaths -----------------------------------------------------------------------------------------------------------

    def kill(self, rank: SimRank, raised: str = "") -> None:
        """SIGKILL, whoever sent it, or an error of its own; the host sees it a moment later."""
        if rank.alive:
            rank.raised = raised
            rank.die()
            self._soon(0.0002, 0.05, lambda: self._ending(rank))
            self._soon(0.005, 0.03, lambda: self._bury(rank))

    def kill_all(self) -> None:
        for _, rank in sorted(self.ranks.items()):
            self.kill(rank)

    def vanish(self) -> None:
        """With their host: nobody is left to tell of them."""
        for _, rank in sorted(self.ranks.items()):
            rank.die()
        self.ranks.clear()

    def _ending(self, rank: SimRank) -> None:
        if self.ranks.get(rank.device) is rank and not rank.raised:
            self._say(RankEnding(device=rank.device, pid=rank.pid, report=_last_report(rank)))

    def _bury(self, rank: SimRank) -> None:
        if self.ranks.get(rank.device) is not rank:
            return
        del self.ranks[rank.device]
        self._say(
            RankExited(
                device=rank.device,
                pid=rank.pid,
                exit_code=1 if rank.raised else -9,
                report=_last_report(rank),
                message=rank.raised,
                user_error=bool(rank.raised),
            )
        )
        for request in self._preparing:
            if rank.device in request.devices:
                self._fork(rank.device, request.generation)
                break


def _last_report(rank: SimRank) -> RankReport:
    owes = rank.session_of > rank.reported
    return rank.last_report(rank.session_of if owes else max(rank.session_of, rank.reported, rank.born))
