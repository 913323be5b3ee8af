"""A host's processes: the zygote, every rank forked from it, and the seats they have been promised to.

It forks, counts, feeds and buries, and tells what became of whom; it refuses to know generations' fates, supervisors and
why anybody is killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.host_events import HostEvent, HostFailed, HostOpened, RankEnding, SeatsPrepared
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.requests import OpenHost, PrepareSeats

from .keeper import Zygote
from .mail import FromRank, StandBy, order_frame, read_said
from .processes import stack_of
from .seat import Seat, open_seat
from .understudies import Understudies

_EXIT_CODE_WAIT_S = 0.2
_CLOSE_S = 10.0


@dataclass(slots=True)
class _Preparation:
    request: PrepareSeats
    retried: set[Device] = field(default_factory=set)


class Crew:
    """Used on one asyncio loop.

    tell: takes what becomes of the processes; heard: what a rank says, in its order; spawned: a process that has just been
    asked for; left: one that is gone and has said everything; address: where this node's ranks listen;
    secrets: of the job's environment.
    """

    def __init__(
        self,
        order: OpenHost,
        address: str,
        secrets: Mapping[str, str],
        *,
        tell: Callable[[HostEvent], None],
        heard: Callable[[Seat, FromRank], None],
        spawned: Callable[[Seat], None],
        left: Callable[[Seat], None],
    ) -> None:
        self._address = address
        self._log_dir = Path(order.log_dir)
        self._keeps_memory = order.spec.train.device == "cuda"
        """What ends holds its device's memory until it is gone, and a successor may not fit beside it."""
        self._tell = tell
        self._heard = heard
        self._spawned = spawned
        self._left = left
        self._zygote = Zygote(order, secrets, self._zygote_said, self._zygote_ended)
        self._started_at = 0.0
        self.opened: HostOpened | None = None
        """What was told when the zygote was warm."""
        self._failed = False
        self._closing = False
        self._seats: dict[int, Seat] = {}
        """Every process that has not been told dead yet, by seat number."""
        self._at: dict[Device, Seat] = {}
        """The newest seat of each device."""
        self._understudies = Understudies(lambda device: self._fork(device, Generation(0), is_understudy=True))
        self._last_seat = 0
        self._preparations: list[_Preparation] = []
        self._dumps: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Of every process that has not been told dead yet."""
        return tuple(seat for seat in self._seats.values() if not seat.is_understudy)

    @property
    def at(self) -> Mapping[Device, Seat]:
        """The newest seat of each device."""
        return self._at

    @property
    def understudies(self) -> Mapping[Device, int]:
        """Pids of those that could take over now."""
        return self._understudies.ready

    @property
    def zygote_pid(self) -> int:
        """0 where there is none."""
        return self._zygote.pid

    def start(self) -> None:
        """Raises OSError where no process can be started."""
        self._started_at = time.monotonic()
        try:
            self._zygote.start()
        except EverstepError as error:
            self._fail(str(error))

    def prepare(self, request: PrepareSeats) -> None:
        """Have a living process on each device; SeatsPrepared is told once all have been forked."""
        if self._failed or self._closing:
            return
        for device in request.devices:
            seat = self._at.get(device)
            if seat is None or not seat.is_living:
                self._spawn(device, request.generation)
            else:
                seat.prepared = max(seat.prepared, request.generation)
            if request.stand_by is not None:
                self.post(self._at[device], order_frame(StandBy(plan=request.stand_by)))
        self._preparations.append(_Preparation(request))
        self._answer_preparations()

    def fork_ahead(self, wanted: Collection[Device]) -> None:
        """Bring an idle process for each of these devices nearer, so that nobody waits for a fork after a death."""
        if not self._failed and not self._closing:
            self._understudies.keep(wanted)

    def stands_by(self, seat: Seat) -> None:
        """It said so; whoever asked for it is told once all of them do."""
        seat.stands_by = True
        seat.fork_s = 0.0  # paid before it was needed
        self._answer_preparations()

    def post(self, seat: Seat, frame: bytes) -> None:
        seat.channel.post(frame)
        if seat.channel.is_backed_up:
            asyncio.get_running_loop().add_writer(seat.channel, self._flush, seat)

    def watch(self, seat: Seat) -> None:
        """Know of its end when it begins, from now on; it has said something, so it holds its lifeline."""
        if not seat.is_watched:
            seat.is_watched = True
            seat.lifeline.watch(lambda: self._rank_ending(seat))

    def kill_with_stack(self, seat: Seat, why: str) -> None:
        """Dead as far as anybody else is concerned; its process ends a moment later, when it has said where it was."""
        if not seat.is_living or not seat.is_forked:
            seat.kill(why)
            return
        seat.doomed = why
        task = asyncio.ensure_future(self._dump_and_kill(seat))
        self._dumps.add(task)
        task.add_done_callback(self._dumps.discard)

    async def _dump_and_kill(self, seat: Seat) -> None:
        if seat.gone_at:
            return  # its descriptor may mean another process by now
        try:
            seat.stack = await stack_of(seat.pid, seat.pidfd, seat.log)
        finally:
            seat.execute()

    def kill_zygote(self) -> None:
        """On purpose; its end is noticed like any other."""
        self._zygote.kill()

    async def close(self) -> None:
        """End everything; returns when nothing is left. Raises EverstepError where processes outlive SIGKILL."""
        self._closing = True
        self._preparations.clear()
        for seat in self._seats.values():
            seat.kill("its host was closed")
        self._zygote.kill()
        self._note_if_empty()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._empty.wait()
        except TimeoutError:
            left = sorted(seat.pid for seat in self._seats.values())
            said = f"processes {left} still exist {_CLOSE_S:g} s after SIGKILL; look at what blocks them"
            raise EverstepError(said) from None

    # --- births -----------------------------------------------------------------------------------------------------------

    def _spawn(self, device: Device, generation: Generation) -> None:
        seat = self._understudies.take(device, generation) or self._fork(device, generation)
        self._at[device] = seat
        self._spawned(seat)

    def _fork(self, device: Device, generation: Generation, *, is_understudy: bool = False) -> Seat:
        self._last_seat += 1
        seat, fds = open_seat(
            self._last_seat, device, generation, self._address, self._log_dir, is_understudy=is_understudy
        )
        self._seats[seat.number] = seat
        asyncio.get_running_loop().add_reader(seat.bell, self._rank_speaks, seat)
        self._zygote.fork(seat.number, device.index, fds, rehearses=is_understudy)
        for fd in fds:
            os.close(fd)
        return seat

    def _zygote_said(self, message: dict[str, Any], fd: int) -> None:
        match message["kind"]:
            case "warm":
                self.opened = HostOpened(seconds=time.monotonic() - self._started_at)
                self._tell(self.opened)
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
            self._fail(f"the zygote ended with exit code {exit_code}", exit_code)
        for seat in list(self._seats.values()):
            # Its death signal is on its way to them; nobody is left to say how they ended.
            if seat.gone_at or not seat.is_forked:
                self._bury(seat, -9)
        self._note_if_empty()

    def _fail(self, message: str, exit_code: int = 0) -> None:
        if not self._failed:
            self._failed = True
            self._tell(HostFailed(message=message, log_tail=self._zygote.log_tail(), exit_code=exit_code))

    def _answer_preparations(self) -> None:
        for preparation in list(self._preparations):
            request = preparation.request
            seats = {device: self._at.get(device) for device in request.devices}
            ready = {
                device: seat
                for device, seat in seats.items()
                if seat and seat.is_living and seat.is_forked and (seat.stands_by or request.stand_by is None)
            }
            # The end of a device's last process is told before its successor is: a supervisor knows one process a device.
            told = all(
                self._at.get(seat.device) is seat or (seat.is_ending and not self._keeps_memory)
                for seat in self.seats
                if seat.device in seats
            )
            if len(ready) == len(seats) and told:
                self._preparations.remove(preparation)
                self._tell(
                    SeatsPrepared(
                        generation=request.generation,
                        addresses={device: seat.address for device, seat in ready.items()},
                        pids={device: seat.pid for device, seat in ready.items()},
                    )
                )

    # --- deaths -----------------------------------------------------------------------------------------------------------

    def _rank_ending(self, seat: Seat) -> None:
        """Its device can be forked for and its peers can leave while the kernel takes its memory apart."""
        if not seat.is_living or seat.number not in self._seats:
            return
        self._rank_speaks(seat)  # what it said before it ended comes before its end
        if not seat.raised:  # then its exit code is part of the verdict
            seat.is_ending = True
            self._tell(RankEnding(device=seat.device, pid=seat.pid, report=seat.last_report("its end has begun")))

    def _rank_gone(self, seat: Seat) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(seat.pidfd)
        seat.gone_at = time.monotonic()
        if not self._zygote.is_alive:
            self._bury(seat, -9)
        else:  # its parent says how it ended, in a moment; unless its parent is stopped
            loop.call_later(_EXIT_CODE_WAIT_S, self._bury, seat, -9)

    def _bury(self, seat: Seat, exit_code: int) -> None:
        if self._seats.pop(seat.number, None) is None:
            return
        loop = asyncio.get_running_loop()
        seat.gone_at = seat.gone_at or time.monotonic()
        loop.remove_reader(seat.bell)
        loop.remove_writer(seat.channel)
        if seat.pidfd >= 0:
            loop.remove_reader(seat.pidfd)
        self._rank_speaks(seat)  # what it said before it ended comes before its end
        if seat.is_understudy:
            self._understudies.lose(seat)
            seat.close()
            self._note_if_empty()
            return
        if self._at.get(seat.device) is seat:
            del self._at[seat.device]
        self._tell(seat.exit_event(exit_code, seat.is_finished))
        self._left(seat)
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
                if preparation.request.stand_by is not None:
                    self.post(self._at[seat.device], order_frame(StandBy(plan=preparation.request.stand_by)))
                return

    def _note_if_empty(self) -> None:
        if self._closing and not self._seats and not self._zygote.is_alive:
            self._empty.set()

    # --- words ------------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take in what ranks have said without waking anybody."""
        for seat in list(self._seats.values()):
            self._rank_speaks(seat)

    def _rank_speaks(self, seat: Seat) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(seat.bell)  # first: what is said from now on rings again
        frames, _ = seat.channel.receive()
        for kind, body in frames:
            self._heard(seat, read_said(kind, body))

    def _flush(self, seat: Seat) -> None:
        seat.channel.flush()
        if not seat.channel.is_backed_up:
            asyncio.get_running_loop().remove_writer(seat.channel)
