"""The thread of a rank that obeys: it hears the host, carries out what cannot wait and leaves the rest to who trains.

It owns the reading end of the channel and the moment at which a training thread counts as stuck. It refuses to know how a
generation is taken part in, and ends the process when nobody could give it orders any more.
"""

from __future__ import annotations

import os
import select
import time
import traceback
from collections.abc import Callable
from math import inf

from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.ids import Generation
from orchestrator.domain.requests import (
    BeginJoin,
    CloseGeneration,
    EndJoin,
    FormGeneration,
    InjectFault,
    SaveSoon,
    SetPacing,
    StopAfter,
)

from .faults import Faults
from .mail import BROKEN, Channel, StandBy, ToRank, read_order
from .orders import Orders

STUCK_S = 0.05
"""Leaving takes a few milliseconds; who is still in a transfer after this long is taken for stuck."""
_BACKLOG_S = 1.0
"""The longest a backlog made by the training thread goes unnoticed."""


class Control:
    """take_over: have another training thread answer the close of this generation; the one there is will not."""

    def __init__(self, channel: Channel, orders: Orders, faults: Faults, take_over: Callable[[Generation], None]) -> None:
        self._channel = channel
        self._orders = orders
        self._faults = faults
        self._take_over = take_over
        self._look_at = inf
        """When to look whether the training thread is stuck."""

    def run(self) -> None:
        """Obey until the process ends."""
        try:
            poller = select.poll()
            while True:
                poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.is_backed_up else 0))
                ready = poller.poll(min(_BACKLOG_S, max(0.0, self._look_at - time.monotonic())) * 1000)
                self._replace_if_stuck()
                if not ready:
                    continue
                self._channel.flush()
                frames, is_open = self._channel.receive()
                for kind, body in frames:
                    self._carry_out(read_order(kind, body))
                if not is_open:
                    os._exit(0)  # the host is gone: nobody could ever close, settle or kill this rank
        except BaseException:
            traceback.print_exc()
            os._exit(BROKEN)

    def _carry_out(self, order: ToRank) -> None:
        match order:
            case InjectFault():
                self._take_fault(order.fault)
            case StopAfter():
                self._orders.stop_after(order.generation)
            case SaveSoon():
                self._orders.save_soon(order)
            case SetPacing():
                self._orders.set_pacing(order)
            case EndJoin():
                self._orders.end_join(order.generation)
            case BeginJoin():
                self._orders.begin_join(order)
            case CloseGeneration():
                if self._orders.close(order):
                    self._look_at = time.monotonic() + STUCK_S
            case FormGeneration():
                self._orders.form(order)
            case StandBy():
                self._orders.put(order)

    def _replace_if_stuck(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = inf
        if not (unanswered := self._orders.unanswered()):
            return
        closed, session = unanswered
        if session.give_up():
            self._take_over(closed)
        else:
            self._look_at = now + STUCK_S  # it computes; the host kills it if that takes too long

    def _take_fault(self, fault: FaultRequested) -> None:
        if fault.fault in (FaultKind.CUT_LINK, FaultKind.SLOW_LINK):
            self._faults.take_for_links(fault, self._orders.session())
        else:
            self._faults.take(fault)
