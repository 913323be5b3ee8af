"""One job on one node, from the moment its host is opened: what its ranks are told, and what is made of what they say.

    requests ──> generations formed and closed ──> orders to ranks
    ranks    ──> what they say, what is seen of them ──> events

It owns the generations its ranks are told of; the processes are its crew's, and what is looked at unasked its rounds'. It
refuses to know terms, supervisors and the reasons for what it is asked.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from orchestrator.adapters.index import own_folder
from orchestrator.adapters.places import place
from orchestrator.domain.host_events import (
    FaultCarriedOut,
    JoinerAt,
    JoinFailed,
    RankFinished,
    RankReady,
    RankReported,
    ShardNotSaved,
)
from orchestrator.domain.ids import Device, Generation, JobId
from orchestrator.domain.requests import (
    CloseGeneration,
    FormGeneration,
    InjectFault,
    KillRank,
    LookAround,
    OpenHost,
    PrepareSeats,
)

from .checkpoint.dispatch import Dispatch
from .checkpoint.tier import sweep_left
from .crew import Crew
from .injection import Injection
from .leave import Leave
from .mail import Between, FromRank, HandedOver, Passed, Raised, StandsBy, order_frame
from .outbox import Outbox
from .page.reader import Sight
from .processes import look_at
from .rounds import Rounds
from .seat import Seat


class LocalJob:
    """Used on one asyncio loop.

    secrets: of the job's environment; address: where this node's ranks listen; grace_s: see Isolation; end: how the host
    dies, where that is asked for; forsaken: see Rounds.
    """

    def __init__(
        self,
        order: OpenHost,
        secrets: Mapping[str, str],
        address: str,
        outbox: Outbox,
        *,
        grace_s: float,
        end: Callable[[], None],
        forsaken: Callable[[], None],
    ) -> None:
        self._order = order
        self._outbox = outbox
        self._formed = Generation(0)
        self._closed = Generation(0)
        self._sweeping: asyncio.Future[None] | None = None
        self._dispatch = Dispatch(order, outbox.add)
        self.crew = Crew(
            order,
            address,
            secrets,
            tell=outbox.add,
            heard=self._take_in,
            spawned=self._spawned,
            left=self._collect,
        )
        self._injection = Injection(self.crew, outbox.add, end)
        self.rounds = Rounds(
            order,
            self.crew,
            self._dispatch,
            outbox,
            grace_s=grace_s,
            under_way=lambda: self.under_way,
            forsaken=forsaken,
        )

    @property
    def id(self) -> JobId:
        return self._order.job

    @property
    def newest(self) -> Generation:
        """That ranks were told to form or to leave."""
        return max(self._formed, self._closed)

    @property
    def under_way(self) -> Generation:
        """The one that they were told to form and not to leave; 0 for none."""
        return self._formed if self._formed > self._closed else Generation(0)

    @property
    def saver_pid(self) -> int:
        """0 where there is none."""
        return self._dispatch.saver_pid

    def sights(self) -> dict[Device, Sight]:
        return {device: seat.page.look() for device, seat in self.crew.at.items()}

    # --- requests ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises OSError where no process can be started."""
        self.crew.start()
        if mine := self._local_copies():
            self._sweeping = asyncio.ensure_future(asyncio.to_thread(_sweep_left, mine))
        self.rounds.start()

    def say_opened(self) -> None:
        """Once more, where it is."""
        if (opened := self.crew.opened) is not None:
            self._outbox.add(opened)

    def prepare(self, request: PrepareSeats) -> None:
        self.crew.prepare(request)

    def form(self, form: FormGeneration) -> None:
        # A close can overtake a form on its way here, and an older form a newer one.
        if form.generation <= self.newest:
            return
        crew, self._formed = self.crew, form.generation
        self._dispatch.begin(form.generation)
        self.rounds.formed(form.generation, tuple(device for device in sorted(crew.at) if device in form.plan.seat_of))
        frame = order_frame(form)
        for device, seat in crew.at.items():
            if device not in form.plan.seat_of and device not in form.donors:
                # Everything it held is held by members or on its way to them; its device is free for others.
                seat.kill(f"has no part in generation {form.generation}")
            elif seat.is_living and form.addresses.get(device, seat.address) == seat.address:
                # Not the successor of the process that was asked for: it holds nothing of what is planned with.
                seat.formed = form.generation
                seat.is_finished = False
                crew.post(seat, frame)

    def pass_on(self, order: Between) -> None:
        frame = order_frame(order)
        for seat in self.crew.seats:
            if seat.is_living:
                self.crew.post(seat, frame)

    def close_generation(self, generation: Generation) -> None:
        self._closed = max(self._closed, generation)
        for seat in self.crew.seats:
            if seat.is_living and seat.born <= generation:
                self._tell_to_leave(seat, generation)

    def kill(self, request: KillRank) -> None:
        seat = self.crew.at.get(request.device)
        if seat is None or request.pid not in (0, seat.pid):
            return  # an earlier process on that device was meant
        if request.mark and not self._is_still_so(request, seat):
            return  # the judgement was late
        if request.dump:
            self.crew.kill_with_stack(seat, request.why)
        else:
            seat.kill(request.why)

    def _is_still_so(self, request: KillRank, seat: Seat) -> bool:
        """It has not moved since, and is not merely waiting for another one after what it was judged for is over."""
        sight = self.rounds.lookout.sight(request.device, seat)
        return request.mark == sight.mark and sight.is_guilty

    def look_around(self, request: LookAround) -> None:
        self.rounds.look_around(request)

    def inject(self, request: InjectFault) -> None:
        self._injection.carry_out(request)

    async def close(self) -> None:
        """End everything; returns when nothing is left. Raises EverstepError where processes outlive SIGKILL."""
        self.rounds.stop()
        await asyncio.gather(self._dispatch.close(), self.crew.close())
        if mine := self._local_copies():  # that nobody would sweep when the job is over
            await asyncio.to_thread(shutil.rmtree, mine, ignore_errors=True)

    # --- leaving a generation ---------------------------------------------------------------------------------------------

    def _spawned(self, seat: Seat) -> None:
        self._injection.spawned(seat)
        if seat.born <= self._closed:  # the close overtook the preparation: it is owed a report all the same
            self._tell_to_leave(seat, seat.born)

    def _tell_to_leave(self, seat: Seat, generation: Generation) -> None:
        if seat.reported >= generation:
            return
        leave_s = self._order.spec.recovery.killed_after_s
        self.crew.post(seat, order_frame(CloseGeneration(generation=generation)))
        leave = Leave(leave_s, time.monotonic(), look_at(seat.pid))
        asyncio.get_running_loop().call_later(leave_s, self._overdue, seat, generation, leave)

    def _overdue(self, seat: Seat, generation: Generation, leave: Leave) -> None:
        if not seat.is_living or seat.reported >= generation:
            return
        if more_s := leave.more_s(time.monotonic(), look_at(seat.pid)):
            asyncio.get_running_loop().call_later(more_s, self._overdue, seat, generation, leave)
        else:
            leave_s = self._order.spec.recovery.killed_after_s
            seat.kill(f"did not leave generation {generation} within {leave_s:g} s")

    # --- what ranks say ---------------------------------------------------------------------------------------------------

    def _take_in(self, seat: Seat, said: FromRank) -> None:
        match said:
            case Passed(generation=generation, answer=answer, at=at, computed_s=computed_s):
                self.rounds.passed(generation)
                if computed_s:
                    self._outbox.add_pace(generation, seat.device, computed_s)
                if self._outbox.add_passed(generation, answer, at):
                    self.rounds.committed()
            case RankReported(report=report):
                seat.reported = max(seat.reported, report.generation)
                self._outbox.add(said, gathering=self._awaits_reports(report.generation))
            case RankReady():
                self.crew.watch(seat)
                phases = {"fork": seat.fork_s, **said.phases}
                seat.fork_s = 0.0  # paid once, by the generation it was forked for
                self.rounds.moved()
                seat.ready = max(seat.ready, said.generation)
                is_last = all(one.ready >= said.generation for one in self._members(said.generation))
                self._outbox.add(replace(said, phases=phases), gathering=not is_last)
            case RankFinished():
                seat.is_finished = True
                self._outbox.add(said)
            case HandedOver():
                self._collect(seat)
            case ShardNotSaved() | JoinerAt() | JoinFailed():
                self._outbox.add(said)
            case StandsBy():
                self.crew.stands_by(seat)
            case FaultCarriedOut():
                self._injection.struck(seat, said)
            case Raised(message=message):
                seat.raised = message
            case _:
                assert_never(said)

    def _awaits_reports(self, generation: Generation) -> bool:
        """Whether this one means nothing alone: the generation is closed, and others here that were told so owe theirs."""
        if generation > self._closed:
            return False  # by itself: that is news
        return any(
            seat.reported < generation and seat.born <= generation
            for seat in self.crew.seats
            if seat.is_living and seat.is_forked
        )

    def _members(self, generation: Generation) -> list[Seat]:
        return [seat for seat in self.crew.seats if seat.is_living and seat.formed == generation]

    def _collect(self, seat: Seat) -> None:
        """What it has handed over is written, whatever becomes of it."""
        self._dispatch.collect(seat.custody)

    def _local_copies(self) -> Path | None:
        local = self._order.spec.checkpoint.local
        return own_folder(local, self._order.node, place(self._order.checkpoint_dir)) if local else None


def _sweep_left(mine: Path) -> None:
    for folder in sweep_left(mine, time.time()):
        print(f"removed {folder}: copies of checkpoints that nobody has added to for a week", flush=True)
