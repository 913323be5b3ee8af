"""One node's processes for one job: carries out a supervisor's requests and tells what becomes of them.

It owns the zygote, the ranks' processes and the numbered events. It refuses to know Redis, Ray, torch and the reasons for
what it is asked; it decides one thing by itself: what to do when nobody has asked anything for a long time.

    supervisor ── handle(request) ──> Host ── fork ──> zygote ── rank
               <── poll: events ────       <── page, frames, pidfd ──┘
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

from orchestrator.domain.errors import EverstepError, StaleTerm
from orchestrator.domain.ids import Device, EffectId, Generation, Term
from orchestrator.domain.protocol import (
    CloseGeneration,
    CloseHost,
    Envelope,
    FormGeneration,
    HostFailed,
    HostMessage,
    HostOpened,
    HostRequest,
    KillRank,
    OpenHost,
    PrepareSeats,
    RankFinished,
    RankReady,
    RankReported,
    SeatsPrepared,
    ShardSaved,
    Together,
)

from .isolation import GRACE_S, Isolation
from .keeper import Zygote
from .mail import FromRank, Passed, Raised, order_frame, read_said
from .outbox import Outbox
from .page import Sight
from .seat import Seat, open_seat

_WATCH_S = 0.5
_EXIT_CODE_WAIT_S = 0.2
_CLOSE_S = 10.0
_MAX_OUTCOMES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a poll says besides events: the ranks' pages, for whoever looks for hangs."""

    term: Term
    ranks: dict[Device, Sight]


@dataclass(slots=True)
class _Preparation:
    request: PrepareSeats
    retried: set[Device] = field(default_factory=set)


class Host:
    """Used on one asyncio loop; `address` is where this node's ranks listen."""

    def __init__(self, address: str = "127.0.0.1", isolation_grace_s: float = GRACE_S) -> None:
        self._address = address
        self._term = Term(0)
        self._outcomes: OrderedDict[EffectId, asyncio.Task[None]] = OrderedDict()
        self._outbox = Outbox()
        self._order: OpenHost | None = None
        self._zygote: Zygote | None = None
        self._opened: HostOpened | None = None
        self._opened_at = 0.0
        self._failed = False
        self._closing = False
        self._seats: dict[int, Seat] = {}
        """Every process that has not been told dead yet, by seat number."""
        self._at: dict[Device, Seat] = {}
        """The newest seat of each device."""
        self._last_seat = 0
        self._preparations: list[_Preparation] = []
        self._formed = Generation(0)
        self._closed = Generation(0)
        now = time.monotonic()
        self._isolation = Isolation(heard_at=now, moved_at=now, grace_s=isolation_grace_s)
        self._watch: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    # --- the supervisor's two calls ---------------------------------------------------------------------------------------

    async def handle(self, term: Term, effect_id: EffectId, request: HostMessage) -> None:
        """Start what is asked; what comes of it is told by events. A repeated effect id gets its first outcome.

        Returns when nothing is left, for CloseHost; at once, for all others. Raises StaleTerm, EverstepError.
        """
        self._hear(term)
        if isinstance(request, Together):
            await self._handle_all(term, request)
            return
        outcome = self._outcomes.get(effect_id)
        if outcome is None:
            outcome = self._outcomes[effect_id] = asyncio.ensure_future(self._carry_out(request))
            if len(self._outcomes) > _MAX_OUTCOMES:
                self._outcomes.popitem(last=False)
        await asyncio.shield(outcome)

    async def _handle_all(self, term: Term, together: Together) -> None:
        refusals = []
        for effect_id, request in together.requests.items():
            try:
                await self.handle(term, effect_id, request)
            except StaleTerm:
                raise
            except EverstepError as error:
                refusals.append(str(error))
        if refusals:
            raise EverstepError("; ".join(refusals))

    async def poll(
        self, term: Term, after: int, timeout_s: float, acked: int | None = None
    ) -> tuple[tuple[Envelope, ...], Heartbeat]:
        """Events numbered above `after` as soon as there are any, none after timeout_s.

        Those up to `acked` (by default `after`) are recorded and forgotten; a new supervisor is told the rest again.
        Raises StaleTerm, also where a higher term speaks up during the wait.
        """
        self._hear(term)
        envelopes = await self._outbox.fetch(after, timeout_s, acked)
        self._hear(term)
        return envelopes, Heartbeat(term=self._term, ranks=self.sights())

    def sights(self) -> dict[Device, Sight]:
        return {device: seat.page.look() for device, seat in self._at.items()}

    def _hear(self, term: Term) -> None:
        if term < self._term:
            raise StaleTerm(f"term {term} has been replaced by {self._term}; stop, another supervisor holds this job")
        if term > self._term:
            self._term = term
            self._outbox.wake()  # whoever polls with the old term learns it now
        self._isolation.hear(time.monotonic())

    async def _carry_out(self, request: HostRequest) -> None:
        match request:
            case OpenHost():
                self._open(request)
            case PrepareSeats():
                self._prepare(request)
            case FormGeneration():
                self._form(request)
            case CloseGeneration():
                self._close_generation(request.generation)
            case KillRank(device=device):
                if seat := self._at.get(device):
                    seat.kill("killed by request")
            case CloseHost():
                await self._close()
            case _:
                assert_never(request)

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _open(self, order: OpenHost) -> None:
        if self._closing:
            raise EverstepError("this host has been closed; create another one")
        if self._order is not None:
            if order.job != self._order.job:
                raise EverstepError(f"this host serves job {self._order.job}, not {order.job}; create another one")
            if self._opened is not None:
                self._outbox.add(self._opened)
            return
        self._order = order
        self._opened_at = time.monotonic()
        self._zygote = Zygote(order, self._zygote_said, self._zygote_ended)
        self._zygote.start()
        self._schedule_watch()

    def _prepare(self, request: PrepareSeats) -> None:
        self._opened_order()
        if self._failed or self._closing:
            return
        for device in request.devices:
            seat = self._at.get(device)
            if seat is None or not seat.is_living:
                self._spawn(device, request.generation)
            else:
                seat.prepared = max(seat.prepared, request.generation)
        self._preparations.append(_Preparation(request))
        self._answer_preparations()

    def _form(self, form: FormGeneration) -> None:
        self._opened_order()
        # A close can overtake a form on its way here, and an older form a newer one.
        if form.generation <= max(self._closed, self._formed):
            return
        self._formed = form.generation
        frame = order_frame(form)
        for device, seat in self._at.items():
            if device not in form.plan.seat_of and device not in form.donors:
                # Everything it held is held by members or on its way to them; its device is free for others.
                seat.kill(f"has no part in generation {form.generation}")
            elif seat.is_living:
                seat.formed = form.generation
                seat.is_finished = False
                self._post(seat, frame)
        self._isolation.move(time.monotonic())

    def _close_generation(self, generation: Generation) -> None:
        order = self._opened_order()
        self._closed = max(self._closed, generation)
        for seat in self._seats.values():
            if seat.is_living and seat.born <= generation:
                self._tell_to_leave(seat, generation, order.spec.recovery.leave_s)

    def _tell_to_leave(self, seat: Seat, generation: Generation, leave_s: float) -> None:
        if seat.reported >= generation:
            return
        self._post(seat, order_frame(CloseGeneration(generation=generation)))
        asyncio.get_running_loop().call_later(leave_s, self._overdue, seat, generation, leave_s)

    def _overdue(self, seat: Seat, generation: Generation, leave_s: float) -> None:
        if seat.is_living and seat.reported < generation:
            seat.kill(f"did not leave generation {generation} within {leave_s:g} s")

    def _opened_order(self) -> OpenHost:
        if self._order is None:
            raise EverstepError("this host has not been opened; send OpenHost first")
        return self._order

    async def _close(self) -> None:
        self._closing = True
        self._preparations.clear()
        if self._watch is not None:
            self._watch.cancel()
        for seat in self._seats.values():
            seat.kill("its host was closed")
        if self._zygote is not None:
            self._zygote.kill()
        self._note_if_empty()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._empty.wait()
        except TimeoutError:
            left = sorted(seat.pid for seat in self._seats.values())
            said = f"processes {left} still exist {_CLOSE_S:g} s after SIGKILL; look at what blocks them"
            raise EverstepError(said) from None
        self._outbox.close()

    # --- processes --------------------------------------------------------------------------------------------------------

    def _spawn(self, device: Device, generation: Generation) -> None:
        order, zygote = self._opened_order(), self._zygote
        assert zygote is not None
        self._last_seat += 1
        seat, fds = open_seat(self._last_seat, device, generation, self._address, Path(order.log_dir))
        self._seats[seat.number] = self._at[device] = seat
        asyncio.get_running_loop().add_reader(seat.channel, self._rank_speaks, seat)
        zygote.fork(seat.number, device.index, fds)
        for fd in fds:
            os.close(fd)
        if generation <= self._closed:  # the close overtook the preparation: it is owed a report all the same
            self._tell_to_leave(seat, generation, order.spec.recovery.leave_s)

    def _zygote_said(self, message: dict[str, Any], fd: int) -> None:
        match message["kind"]:
            case "warm":
                self._opened = HostOpened(seconds=time.monotonic() - self._opened_at)
                self._outbox.add(self._opened)
            case "forked":
                seat = self._seats[message["seat"]]
                seat.take(int(message["pid"]), fd)
                asyncio.get_running_loop().add_reader(fd, self._rank_gone, seat)
                self._answer_preparations()
            case "exited":
                for seat in [seat for seat in self._seats.values() if seat.pid == message["pid"]]:
                    self._bury(seat, int(message["code"]))
            case "failed":
                self._fail(str(message["message"]))

    def _zygote_ended(self, exit_code: int) -> None:
        if not self._closing:
            self._fail(f"the zygote ended with exit code {exit_code}")
        for seat in list(self._seats.values()):
            # Its death signal is on its way to them; nobody is left to say how they ended.
            if seat.gone_at or not seat.is_forked:
                self._bury(seat, -9)
        self._note_if_empty()

    def _fail(self, message: str) -> None:
        if not self._failed:
            self._failed = True
            assert self._zygote is not None
            self._outbox.add(HostFailed(message=message, log_tail=self._zygote.log_tail()))

    def _answer_preparations(self) -> None:
        for preparation in list(self._preparations):
            request = preparation.request
            seats = {device: self._at.get(device) for device in request.devices}
            ready = {device: seat for device, seat in seats.items() if seat and seat.is_living and seat.is_forked}
            # The end of a device's last process is told before its successor is: a supervisor knows one process a device.
            buried = all(self._at.get(seat.device) is seat for seat in self._seats.values() if seat.device in seats)
            if len(ready) == len(seats) and buried:
                self._preparations.remove(preparation)
                self._outbox.add(
                    SeatsPrepared(
                        generation=request.generation,
                        addresses={device: seat.address for device, seat in ready.items()},
                        pids={device: seat.pid for device, seat in ready.items()},
                    )
                )

    def _rank_gone(self, seat: Seat) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(seat.pidfd)
        seat.gone_at = time.monotonic()
        if self._zygote is None or not self._zygote.is_alive:
            self._bury(seat, -9)
        else:  # its parent says how it ended, in a moment; unless its parent is stopped
            loop.call_later(_EXIT_CODE_WAIT_S, self._bury, seat, -9)

    def _bury(self, seat: Seat, exit_code: int) -> None:
        if self._seats.pop(seat.number, None) is None:
            return
        loop = asyncio.get_running_loop()
        seat.gone_at = seat.gone_at or time.monotonic()
        loop.remove_reader(seat.channel)
        loop.remove_writer(seat.channel)
        if seat.pidfd >= 0:
            loop.remove_reader(seat.pidfd)
        self._rank_speaks(seat)  # what it said before it ended comes before its end
        if self._at.get(seat.device) is seat:
            del self._at[seat.device]
        self._outbox.add(seat.exit_event(exit_code, seat.is_finished))
        seat.close()
        self._replace_in_preparations(seat)
        self._answer_preparations()
        self._note_if_empty()

    def _replace_in_preparations(self, seat: Seat) -> None:
        """A rank that ends while its seat is being prepared is forked again, once."""
        if seat.device in self._at or self._failed or self._closing:
            return
        for preparation in self._preparations:
            if seat.device in preparation.request.devices and seat.device not in preparation.retried:
                preparation.retried.add(seat.device)
                self._spawn(seat.device, preparation.request.generation)
                return

    def _note_if_empty(self) -> None:
        if self._closing and not self._seats and (self._zygote is None or not self._zygote.is_alive):
            self._empty.set()

    def _post(self, seat: Seat, frame: bytes) -> None:
        seat.channel.post(frame)
        if seat.channel.is_backed_up:
            asyncio.get_running_loop().add_writer(seat.channel, self._flush, seat)

    def _flush(self, seat: Seat) -> None:
        seat.channel.flush()
        if not seat.channel.is_backed_up:
            asyncio.get_running_loop().remove_writer(seat.channel)

    # --- what ranks say ---------------------------------------------------------------------------------------------------

    def _rank_speaks(self, seat: Seat) -> None:
        frames, is_open = seat.channel.receive()
        if not is_open and seat.number in self._seats:
            asyncio.get_running_loop().remove_reader(seat.channel)
        for kind, body in frames:
            self._take_in(seat, read_said(kind, body))

    def _take_in(self, seat: Seat, said: FromRank) -> None:
        match said:
            case Passed(generation=generation, answer=answer):
                if self._outbox.add_passed(generation, answer, time.time()):
                    self._isolation.commit(time.monotonic())
            case RankReported(report=report):
                seat.reported = max(seat.reported, report.generation)
                self._outbox.add(said)
            case RankReady():
                phases = {"fork": seat.fork_s, **said.phases}
                seat.fork_s = 0.0  # paid once, by the generation it was forked for
                self._isolation.move(time.monotonic())
                self._outbox.add(replace(said, phases=phases))
            case RankFinished():
                seat.is_finished = True
                self._outbox.add(said)
            case ShardSaved():
                self._outbox.add(said)
            case Raised(message=message):
                seat.raised = message
            case _:
                assert_never(said)

    # --- isolation --------------------------------------------------------------------------------------------------------

    def _schedule_watch(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look_around)

    def _look_around(self) -> None:
        self._schedule_watch()
        verdict = self._isolation.judge(time.monotonic(), self._opened_order().spec.recovery.max_isolation_s)
        for seat in list(self._seats.values()) if verdict else ():
            assert verdict is not None
            if not (seat.is_finished and verdict.spares_finished):
                seat.kill(verdict.reason)
