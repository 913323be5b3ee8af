"""Faults on purpose inside a rank: what its host asked for, until it has happened.

It owns the list of what is armed and the damage itself. It refuses to know who wanted it and what becomes of it: it says
that it strikes, over the rank's own channel and on its page, and strikes.

    control thread   take(order) ──> armed ──>  training thread   reached(point) ──> say, then strike
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.host_events import FaultCarriedOut
from orchestrator.domain.ids import Rank, Step
from orchestrator.domain.plan import Plan, Seat

from . import faultpoints
from .emulation import computed_s, delay
from .page.writer import PageWriter
from .parallel.sabotage import BadLink

ENVIRONMENT = "EVERSTEP_FAULTPOINT"
"""point:step kills every rank of the first generation there; point:step:device that one. For tests without a supervisor."""
SLOW_S, FACTOR = 5.0, 4.0
SLOW_BYTES_PER_S = 1e6
FOREVER_S = 3600.0
MAX_PAUSE_S = 1.0
"""The longest sleep a slow rank takes at one micro-batch."""

_AT_ONCE = {FaultKind.NAN: "in_compute", FaultKind.BIT_FLIP: "after_gather", FaultKind.SLOW: "in_compute"}
"""Where a fault without a point strikes; any point will do for the others."""


class InjectedError(RuntimeError):
    """A training program's exception, on purpose."""


class Patient(Protocol):
    """What can be spoiled in a trainer; both say what they did and raise ValueError where there is nothing to spoil."""

    def spoil_gradient(self) -> str: ...
    def flip_bit(self, seed: int) -> str: ...


class Linked(Protocol):
    """A session, as far as its links can be spoiled."""

    @property
    def plan(self) -> Plan: ...
    @property
    def seat(self) -> Seat: ...
    def spoil_links(self, bad_link: BadLink) -> None: ...


@dataclass(frozen=True, slots=True)
class _LinkFault:
    until: float
    bytes_per_s: float


class Faults:
    """say: tells the host, also when this process ends right after."""

    def __init__(self, page: PageWriter, say: Callable[[FaultCarriedOut], None]) -> None:
        self._page = page
        self._say = say
        self._lock = threading.Lock()
        self._armed: list[FaultRequested] = []
        self._slow_until = 0.0
        self._factor = FACTOR
        self._computed_s = 0.0
        self._link: _LinkFault | None = None
        self.patient: Patient | None = None

    def take(self, fault: FaultRequested) -> None:
        """Have it happen at its point. Any thread."""
        with self._lock:
            self._armed.append(fault)
        faultpoints.arm(self.reached)

    def take_from_environment(self, me: str) -> None:
        point, _, rest = os.environ.get(ENVIRONMENT, "").partition(":")
        step, _, device = rest.partition(":")
        if point and device in ("", me):
            self.take(FaultRequested(fault=FaultKind.KILL, at=point, step=Step(int(step or 0)), id=ENVIRONMENT))

    def take_for_links(self, fault: FaultRequested, session: Linked | None) -> None:
        """Have this rank's links to other nodes be cut or slow from now on, in later generations too. Control thread."""
        slow = fault.fault is FaultKind.SLOW_LINK
        duration_s = fault.duration_s or SLOW_S
        link = _LinkFault(time.monotonic() + duration_s, (fault.factor or SLOW_BYTES_PER_S) if slow else 0.0)
        self._link = link
        peers = self.spoil(session) if session is not None else frozenset()
        how = f"at most {link.bytes_per_s:g} bytes/s" if slow else "nothing gets through"
        what = f"to {len(peers)} ranks of other nodes {how} for {duration_s:g} s"
        if session is None:  # between two generations, or without a seat: others of its node may have some
            what = f"to ranks of other nodes {how} for {duration_s:g} s, once there are links"
        elif not peers:
            what = "no link to another node"
        self._tell(fault, what, self._page.step, refused=session is not None and not peers)

    def spoil(self, session: Linked) -> frozenset[Rank]:
        """What is wrong with links stays wrong when they are made anew; the peers it is about."""
        link = self._link
        if link is None or time.monotonic() >= link.until:
            return frozenset()
        seats = session.plan.seats
        peers = frozenset(seat.rank for seat in seats if seat.device.node != session.seat.device.node)
        session.spoil_links(BadLink(peers=peers, until=link.until, bytes_per_s=link.bytes_per_s))
        return peers

    def reached(self, point: str) -> None:
        """The training thread is at `point`: strike, if this is what something armed waits for."""
        step = self._page.step
        with self._lock:
            due = [fault for fault in self._armed if _is_due(fault, point, step)]
            self._armed = [fault for fault in self._armed if fault not in due]
            if not self._armed and not due and not self._slow_until:
                faultpoints.disarm()
        for fault in due:
            self._strike(fault, point, step)
        if self._slow_until and point == "in_compute":
            self._dawdle()

    # --- the damage -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: FaultRequested, point: str, step: Step) -> None:
        where = f"at {point} of step {step}"
        match fault.fault:
            case FaultKind.KILL:
                self._tell(fault, f"killed {where}", step)
                self._page.fault(point)
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.EXIT:
                self._tell(fault, f"exits with code {fault.exit_code} {where}", step)
                os._exit(fault.exit_code & 0xFF)
            case FaultKind.RAISE:
                self._tell(fault, f"raises {where}", step)
                raise InjectedError(f"raised on purpose {where}")
            case FaultKind.STOP:
                self._tell(fault, f"stopped {where}", step)
                os.kill(os.getpid(), signal.SIGSTOP)
            case FaultKind.GIL_HANG:
                self._tell(fault, f"holds the interpreter's lock {where}", step)
                # Unlike CDLL, PyDLL keeps the lock during the call: no other thread of this process runs until it returns.
                ctypes.PyDLL(None).sleep(int(fault.duration_s or FOREVER_S) or 1)
            case FaultKind.SLOW:
                self._factor = fault.factor or FACTOR
                self._slow_until = time.monotonic() + (fault.duration_s or SLOW_S)
                self._computed_s = computed_s()
                self._tell(fault, f"{self._factor:g} times slower from step {step} on", step)
            case FaultKind.NAN | FaultKind.BIT_FLIP:
                self._spoil(fault, where, step)
            case _:
                self._tell(fault, f"a rank cannot do {fault.fault}", step, refused=True)

    def _spoil(self, fault: FaultRequested, where: str, step: Step) -> None:
        patient = self.patient
        if patient is None:
            self._tell(fault, f"nothing to spoil {where}", step, refused=True)
            return
        try:
            done = patient.spoil_gradient() if fault.fault is FaultKind.NAN else patient.flip_bit(fault.seed)
        except ValueError as error:
            self._tell(fault, f"{error} {where}", step, refused=True)
        else:
            self._tell(fault, f"{done} {where}", step)

    def _dawdle(self) -> None:
        computed = computed_s() - self._computed_s
        if time.monotonic() >= self._slow_until:
            self._slow_until = 0.0
            return
        delay(min((self._factor - 1) * computed, MAX_PAUSE_S))
        self._computed_s = computed_s()

    def _tell(self, fault: FaultRequested, message: str, step: Step, *, refused: bool = False) -> None:
        self._say(FaultCarriedOut(id=fault.id, message=message, at=time.time(), step=step, refused=refused))


def _is_due(fault: FaultRequested, point: str, step: Step) -> bool:
    wanted = fault.at or _AT_ONCE.get(fault.fault, "")
    return step >= fault.step and wanted in ("", point)
