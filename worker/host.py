"""One node's processes for one job: carries out a supervisor's requests and tells what becomes of them.

It owns the terms, the generations its ranks are told of and the numbered events; the processes are its crew's. It refuses
to know Redis, Ray, torch and the reasons for what it is asked; it decides one thing by itself: what to do when nobody has
asked anything for a long time.

    supervisor ── handle(request) ──> Host ── fork ──> zygote ── rank
               <── poll: events ────       <── page, frames, pidfd ──┘
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from orchestrator.adapters.index import own_folder
from orchestrator.adapters.places import place
from orchestrator.adapters.secret_folder import SecretFolder
from orchestrator.domain.errors import EverstepError, Refused, StaleTerm
from orchestrator.domain.host_events import (
    Envelope,
    FaultCarriedOut,
    HostFailed,
    JoinerAt,
    JoinFailed,
    RankFinished,
    RankReady,
    RankReported,
    RanksSeen,
    RanksStalled,
    ShardNotSaved,
)
from orchestrator.domain.ids import Device, EffectId, Generation, Term
from orchestrator.domain.requests import (
    BeginJoin,
    CloseGeneration,
    CloseHost,
    EndJoin,
    FormGeneration,
    HostMessage,
    HostRequest,
    InjectFault,
    KillRank,
    LookAround,
    OpenHost,
    PrepareSeats,
    SaveSoon,
    SelfTest,
    SetPacing,
    StopAfter,
    Together,
)
from orchestrator.domain.secrecy import Veil

from .checkpoint.dispatch import Dispatch
from .checkpoint.tier import sweep_left
from .copies import EVERY_S as COPIES_EVERY_S
from .copies import Copies
from .crew import Crew
from .examination import Examination
from .injection import Injection, kill_this_process
from .isolation import GRACE_S, Isolation
from .leave import Leave
from .logtimes import LogTimes
from .lookout import Lookout
from .mail import Between, FromRank, HandedOver, Passed, Raised, StandsBy, order_frame
from .outbox import Outbox
from .page.reader import Sight
from .processes import look_at
from .seat import Seat

_ISOLATION_S = 0.5
_MAX_OUTCOMES = 4096
AHEAD_S = 2.0
"""After a generation's first step; what is forked then takes processors from nobody who waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a poll says besides events: the ranks' pages, for whoever looks for hangs."""

    term: Term
    sights: Callable[[], dict[Device, Sight]]
    """Taken when they are asked for: a supervisor's poll does not."""
    looks: int = 0
    """How often the ranks have been looked at: a number that stands still is a watch that is dead."""

    @property
    def ranks(self) -> dict[Device, Sight]:
        return self.sights()


class Host:
    """Used on one asyncio loop; `address` is where this node's ranks listen; `end` is how it dies, where that is tried or
    nobody counts on it any more."""

    def __init__(
        self,
        address: str = "127.0.0.1",
        isolation_grace_s: float = GRACE_S,
        end: Callable[[], None] = kill_this_process,
    ) -> None:
        self._address = address
        self._end = end
        self._term = Term(0)
        self._outcomes: OrderedDict[EffectId, asyncio.Task[None]] = OrderedDict()
        self._outbox = Outbox()
        self._examination = Examination(self._outbox.add)
        self._order: OpenHost | None = None
        self._crew: Crew | None = None
        self._dispatch: Dispatch | None = None
        self._injection: Injection | None = None
        self._closing = False
        self._ending: asyncio.Future[None] | None = None
        self._formed = Generation(0)
        self._closed = Generation(0)
        self._first_step = Generation(0), 0.0
        """The newest generation that has committed one here, and when."""
        self._seated: tuple[Device, ...] = ()
        """Devices here that have a seat in the newest plan."""
        now = time.monotonic()
        self._isolation = Isolation(heard_at=now, moved_at=now, grace_s=isolation_grace_s)
        self._lookout: Lookout | None = None
        self._copies = Copies()
        self._sweeping: asyncio.Future[None] | None = None
        self._copies_due = 0.0
        self._log_times = LogTimes()
        self._watching: asyncio.TimerHandle | None = None

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
        return envelopes, Heartbeat(term=self._term, sights=self.sights, looks=self._lookout.looks if self._lookout else 0)

    def sights(self) -> dict[Device, Sight]:
        return {device: seat.page.look() for device, seat in self._crew.at.items()} if self._crew else {}

    @property
    def zygote_pid(self) -> int:
        """0 where there is none."""
        return self._crew.zygote_pid if self._crew else 0

    @property
    def understudies(self) -> Mapping[Device, int]:
        """Pids of processes that stand by to replace one of this host's ranks."""
        return self._crew.understudies if self._crew else {}

    @property
    def saver_pid(self) -> int:
        """0 where there is none."""
        return self._dispatch.saver_pid if self._dispatch else 0

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
                self._opened_crew().prepare(request)
            case FormGeneration():
                self._form(request)
            case CloseGeneration():
                self._close_generation(request.generation)
            case BeginJoin() | StopAfter() | SaveSoon() | SetPacing() | EndJoin():
                self._pass_on(request)
            case KillRank():
                self._kill(request)
            case LookAround():
                self._look_around(request)
            case SelfTest(device=device):
                if not self._closing:
                    self._examination.begin(device)
            case InjectFault():
                self._opened_crew()
                assert self._injection is not None
                self._injection.carry_out(request)
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
            if (opened := self._opened_crew().opened) is not None:
                self._outbox.add(opened)
            return
        try:
            secrets = SecretFolder(Path(order.secrets_dir)).environment(order.spec)
        except Refused as error:
            self._outbox.add(HostFailed(message=error.message))
            return
        self._outbox.veil = Veil(secrets.values())
        self._order = order
        self._dispatch = Dispatch(order, self._outbox.add)
        self._crew = Crew(
            order,
            self._address,
            secrets,
            tell=self._outbox.add,
            heard=self._take_in,
            spawned=self._spawned,
            left=self._collect,
        )
        self._injection = Injection(self._crew, self._outbox.add, self._end)
        self._crew.start()
        recovery = order.spec.recovery
        if local := order.spec.checkpoint.local:
            mine = own_folder(local, order.node, place(order.checkpoint_dir))
            self._sweeping = asyncio.ensure_future(asyncio.to_thread(_sweep_left, mine))
        self._lookout = Lookout(
            tells_waits=recovery.backend == "links", waits_inside=recovery.backend == "nccl", hang_s=recovery.hang_s
        )
        self._watch_ranks()

    def _form(self, form: FormGeneration) -> None:
        crew = self._opened_crew()
        # A close can overtake a form on its way here, and an older form a newer one.
        if form.generation <= max(self._closed, self._formed):
            return
        self._formed = form.generation
        assert self._lookout is not None
        self._lookout.begin(form.generation)
        assert self._dispatch is not None
        self._dispatch.begin(form.generation)
        self._seated = tuple(device for device in sorted(crew.at) if device in form.plan.seat_of)
        if not self._seated:
            crew.fork_ahead(())  # no step of this generation will pass here that would begin it
        frame = order_frame(form)
        for device, seat in crew.at.items():
            if device not in form.plan.seat_of and device not in form.donors:
                # Everything it held is held by members or on its way to them; its device is free for others.
                seat.kill(f"has no part in generation {form.generation}")
            elif seat.is_living:
                seat.formed = form.generation
                seat.is_finished = False
                crew.post(seat, frame)
        self._isolation.move(time.monotonic())

    def _pass_on(self, order: Between) -> None:
        crew, frame = self._opened_crew(), order_frame(order)
        for seat in crew.seats:
            if seat.is_living:
                crew.post(seat, frame)

    def _close_generation(self, generation: Generation) -> None:
        crew = self._opened_crew()
        self._closed = max(self._closed, generation)
        for seat in crew.seats:
            if seat.is_living and seat.born <= generation:
                self._tell_to_leave(seat, generation)

    def _spawned(self, seat: Seat) -> None:
        assert self._injection is not None
        self._injection.spawned(seat)
        if seat.born <= self._closed:  # the close overtook the preparation: it is owed a report all the same
            self._tell_to_leave(seat, seat.born)

    def _tell_to_leave(self, seat: Seat, generation: Generation) -> None:
        if seat.reported >= generation:
            return
        leave_s = self._opened_order().spec.recovery.killed_after_s
        self._opened_crew().post(seat, order_frame(CloseGeneration(generation=generation)))
        leave = Leave(leave_s, time.monotonic(), look_at(seat.pid))
        asyncio.get_running_loop().call_later(leave_s, self._overdue, seat, generation, leave)

    def _overdue(self, seat: Seat, generation: Generation, leave: Leave) -> None:
        if not seat.is_living or seat.reported >= generation:
            return
        if more_s := leave.more_s(time.monotonic(), look_at(seat.pid)):
            asyncio.get_running_loop().call_later(more_s, self._overdue, seat, generation, leave)
        else:
            leave_s = self._opened_order().spec.recovery.killed_after_s
            seat.kill(f"did not leave generation {generation} within {leave_s:g} s")

    def _kill(self, request: KillRank) -> None:
        seat = self._opened_crew().at.get(request.device)
        if seat is None or request.pid not in (0, seat.pid):
            return  # an earlier process on that device was meant
        if request.mark and self._lookout is not None and request.mark != self._lookout.sight(request.device, seat).mark:
            return  # it has moved since; the judgement was late
        if request.dump:
            self._opened_crew().kill_with_stack(seat, request.why)
        else:
            seat.kill(request.why)

    def _look_around(self, request: LookAround) -> None:
        assert self._lookout is not None
        at, since_s = self._opened_crew().at, self._lookout.looked_s_ago
        if (stalled := self._look()) is not None:
            self._outbox.add(stalled)
        self._outbox.add(
            RanksSeen(
                generation=request.generation,
                number=request.number,
                sights=self._lookout.sights(at),
                looked_s_ago=since_s,
            )
        )

    def _opened_order(self) -> OpenHost:
        if self._order is None:
            raise EverstepError("this host has not been opened; send OpenHost first")
        return self._order

    def _opened_crew(self) -> Crew:
        if self._crew is None:
            raise EverstepError("this host has not been opened; send OpenHost first")
        return self._crew

    async def _close(self) -> None:
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
        await self._examination.close()
        if self._crew is not None and self._dispatch is not None:
            await asyncio.gather(self._dispatch.close(), self._crew.close())
            order = self._opened_order()
            if local := order.spec.checkpoint.local:  # copies that nobody would sweep when the job is over
                copies = own_folder(local, order.node, place(order.checkpoint_dir))
                await asyncio.to_thread(shutil.rmtree, copies, ignore_errors=True)
        self._outbox.close()

    # --- what ranks say ---------------------------------------------------------------------------------------------------

    def _take_in(self, seat: Seat, said: FromRank) -> None:
        match said:
            case Passed(generation=generation, answer=answer, at=at, computed_s=computed_s):
                if generation > self._first_step[0]:
                    self._first_step = generation, time.monotonic()
                if computed_s:
                    self._outbox.add_pace(generation, seat.device, computed_s)
                if self._outbox.add_passed(generation, answer, at):
                    self._isolation.commit(time.monotonic())
            case RankReported(report=report):
                seat.reported = max(seat.reported, report.generation)
                self._outbox.add(said, gathering=self._awaits_reports(report.generation))
            case RankReady():
                self._opened_crew().watch(seat)
                phases = {"fork": seat.fork_s, **said.phases}
                seat.fork_s = 0.0  # paid once, by the generation it was forked for
                self._isolation.move(time.monotonic())
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
                self._opened_crew().stands_by(seat)
            case FaultCarriedOut():
                assert self._injection is not None
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
            for seat in self._opened_crew().seats
            if seat.is_living and seat.is_forked
        )

    def _members(self, generation: Generation) -> list[Seat]:
        return [seat for seat in self._opened_crew().seats if seat.is_living and seat.formed == generation]

    def _collect(self, seat: Seat) -> None:
        """What it has handed over is written, whatever becomes of it."""
        assert self._dispatch is not None
        self._dispatch.collect(seat.custody)

    # --- watching ---------------------------------------------------------------------------------------------------------

    def _watch_ranks(self) -> None:
        assert self._lookout is not None
        try:
            self._opened_crew().listen()
            if (stalled := self._look()) is not None:
                self._outbox.add(stalled)
            if time.monotonic() - (self._isolation.judged_at or 0.0) >= _ISOLATION_S:
                self._judge_isolation()
            self._look_at_copies(time.monotonic())
            self._fork_ahead()
            self._outbox.tick(time.time())
            self._log_times.note((seat.log for seat in self._opened_crew().at.values()), time.time())
        finally:
            # At round times, so that a look and a tick are one wake-up.
            again_s = self._lookout.look_again_s
            again_s -= time.time() % again_s
            self._watching = asyncio.get_running_loop().call_later(again_s, self._watch_ranks)

    def _look_at_copies(self, now: float) -> None:
        if now < self._copies_due:
            return
        self._copies_due = now + COPIES_EVERY_S
        assert self._dispatch is not None
        if (seen := self._copies.look(now, self._opened_crew().at, self._dispatch.under_way())) is not None:
            self._outbox.add_latest(seen)

    def _look(self) -> RanksStalled | None:
        assert self._lookout is not None
        # Whoever does not leave a closed generation is another rule's.
        return self._lookout.look(self._opened_crew().at if self._formed > self._closed else {})

    def _fork_ahead(self) -> None:
        """Once a generation trains and has trained for a moment, who would replace its ranks is made ready."""
        generation, at = self._first_step
        if self._order is None or self._order.spec.train.device == "cuda":
            return  # memory of a device is for who trains on it
        if generation == self._formed > self._closed and time.monotonic() - at > AHEAD_S:
            # By the plan, not by who lives: of a rank that has just ended the understudy is about to be needed.
            self._opened_crew().fork_ahead(self._seated)

    def _judge_isolation(self) -> None:
        now, allowed_s = time.monotonic(), self._opened_order().spec.recovery.max_isolation_s
        verdict = self._isolation.judge(now, allowed_s)
        for seat in self._opened_crew().seats if verdict else ():
            assert verdict is not None
            if not (seat.is_finished and verdict.spares_finished):
                seat.kill(verdict.reason)
        if self._isolation.is_forsaken(now, allowed_s):
            self._ending = asyncio.ensure_future(self._close_and_end())

    async def _close_and_end(self) -> None:
        await self._close()
        self._end()


def _sweep_left(mine: Path) -> None:
    for folder in sweep_left(mine, time.time()):
        print(f"removed {folder}: copies of checkpoints that nobody has added to for a week", flush=True)
