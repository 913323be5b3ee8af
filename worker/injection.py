"""A host's part in faults on purpose: signals to its own processes, and word to its ranks about the rest.

It owns how a fault reaches the process it is meant for, and that what was stopped goes on in time. It refuses to know why.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from orchestrator.domain.faults import IN_THE_NEXT_PROCESS, FaultKind
from orchestrator.domain.host_events import FaultCarriedOut, HostEvent
from orchestrator.domain.requests import InjectFault

from .crew import Crew
from .mail import order_frame
from .seat import Seat

TOLD_S = 0.1
"""Before a host ends on purpose: time for its last event to leave."""
RESUME_S = 2.0
"""How long a process stays stopped where the request does not say."""


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Injection:
    """Used on the host's loop. end: how this host dies."""

    def __init__(self, crew: Crew, tell: Callable[[HostEvent], None], end: Callable[[], None]) -> None:
        self._crew = crew
        self._tell = tell
        self._end = end
        self._waiting: dict[str, InjectFault] = {}
        """What whoever is forked next on a device is to do, until it has."""
        self._stops: dict[str, float] = {}
        """Seconds after which ranks that stop themselves at a point go on."""

    def carry_out(self, request: InjectFault) -> None:
        """Do it now, or have the rank do it at its point; told by FaultCarriedOut."""
        fault = request.fault
        match fault.fault:
            case FaultKind.HOST_KILL:
                self._say(request, "the host's process is killed")
                asyncio.get_running_loop().call_later(TOLD_S, self._end)
                return
            case FaultKind.ZYGOTE_KILL:
                self._say(request, f"the zygote (pid {self._crew.zygote_pid}) is killed")
                self._crew.kill_zygote()
                return
            case FaultKind.CUT_LINK | FaultKind.SLOW_LINK:
                living = [seat for seat in self._crew.seats if seat.is_living]
                for one in living:
                    self._crew.post(one, order_frame(request))
                if not living:
                    self._say(request, "no rank lives on this host", refused=True)
                return
        if fault.at in IN_THE_NEXT_PROCESS:
            self._waiting[fault.id] = request
        seat = self._crew.at.get(request.device) if request.device else None
        if seat is None or not seat.is_living or not seat.is_forked:
            self._say(request, f"no rank lives on {request.device}", refused=True)
        elif fault.at or fault.step or fault.fault not in (FaultKind.KILL, FaultKind.STOP):
            if fault.fault is FaultKind.STOP:
                self._stops[fault.id] = fault.duration_s or RESUME_S
            self._crew.post(seat, order_frame(request))
        elif fault.fault is FaultKind.KILL:
            self._say(request, f"rank {seat.pid} on {seat.device} is killed")
            seat.kill("killed by request")
        else:
            self._say(request, f"rank {seat.pid} on {seat.device} is stopped")
            seat.send(signal.SIGSTOP)
            self._resume_later(seat, fault.duration_s or RESUME_S)

    def spawned(self, seat: Seat) -> None:
        """A process has just been asked for."""
        for request in self._waiting.values():
            if request.device == seat.device:
                self._crew.post(seat, order_frame(request))

    def struck(self, seat: Seat, said: FaultCarriedOut) -> None:
        """A rank says that it does it now."""
        self._waiting.pop(said.id, None)
        if (duration_s := self._stops.pop(said.id, None)) is not None and not said.refused:
            self._resume_later(seat, duration_s)
        self._tell(said)

    def _resume_later(self, seat: Seat, duration_s: float) -> None:
        def resume() -> None:
            with suppress(OSError):  # it has ended
                seat.send(signal.SIGCONT)

        asyncio.get_running_loop().call_later(duration_s, resume)

    def _say(self, request: InjectFault, message: str, *, refused: bool = False) -> None:
        self._tell(FaultCarriedOut(id=request.fault.id, message=message, at=time.time(), refused=refused))
