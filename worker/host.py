"""One node's processes for one job: carries out a supervisor's requests and tells what becomes of them.

It owns the terms, each request's one outcome, the numbered events and its own end; what it serves, once it is opened, is a
LocalJob. It refuses to know Redis, Ray, torch and the reasons for what it is asked; it decides one thing by itself: what to
do when nobody has asked anything for a long time.

    supervisor ── handle(request) ──> Host ──> LocalJob ── fork ──> zygote ── rank
               <── poll: events ────       <──          <── page, frames, pidfd ──┘
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from orchestrator.adapters.secret_folder import SecretFolder
from orchestrator.domain.errors import EverstepError, Refused, StaleTerm
from orchestrator.domain.host_events import Envelope, HostFailed
from orchestrator.domain.ids import Device, EffectId, Generation, Term
from orchestrator.domain.memo import Remembered
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

from .examination import Examination
from .injection import kill_this_process
from .isolation import GRACE_S
from .local_job import LocalJob
from .outbox import Outbox
from .page.reader import Sight

_MAX_OUTCOMES = 4096


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
        self._isolation_grace_s = isolation_grace_s
        self._end = end
        self._term = Term(0)
        self._memo = ""
        self._outcomes: OrderedDict[EffectId, asyncio.Task[None]] = OrderedDict()
        self._outbox = Outbox()
        self._examination = Examination(self._outbox.add)
        self._job: LocalJob | None = None
        self._closing = False
        self._ending: asyncio.Future[None] | None = None

    # --- the supervisor's two calls ---------------------------------------------------------------------------------------

    async def handle(self, term: Term, effect_id: EffectId, request: HostMessage, memo: str = "") -> None:
        """Start what is asked; what comes of it is told by events. A repeated effect id gets its first outcome.

        memo: what to remember of the job first, see kept; "" for nothing new.

        Returns when nothing is left, for CloseHost; at once, for all others. Raises StaleTerm, EverstepError.
        """
        self._hear(term)
        self._memo = memo or self._memo
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
        self, term: Term, after: int, timeout_s: float, acked: int | None = None, memo: str = ""
    ) -> tuple[tuple[Envelope, ...], Heartbeat]:
        """Events numbered above `after` as soon as there are any, none after timeout_s.

        Those up to `acked` (by default `after`) are recorded and forgotten; a new supervisor is told the rest again.
        Raises StaleTerm, also where a higher term speaks up during the wait.
        """
        self._hear(term)
        self._memo = memo or self._memo
        envelopes = await self._outbox.fetch(after, timeout_s, acked)
        self._hear(term)
        looks = self._job.rounds.lookout.looks if self._job else 0
        return envelopes, Heartbeat(term=self._term, sights=self.sights, looks=looks)

    def kept(self) -> Remembered:
        """For a supervisor that begins; asking shows no term and leaves no trace."""
        heard, at_work = (job.newest, job.under_way) if (job := self._job) else (Generation(0), Generation(0))
        return Remembered(term=self._term, heard=heard, at_work=at_work, memo=self._memo)

    def sights(self) -> dict[Device, Sight]:
        return self._job.sights() if self._job else {}

    @property
    def zygote_pid(self) -> int:
        """0 where there is none."""
        return self._job.crew.zygote_pid if self._job else 0

    @property
    def understudies(self) -> Mapping[Device, int]:
        """Pids of processes that stand by to replace one of this host's ranks."""
        return self._job.crew.understudies if self._job else {}

    @property
    def saver_pid(self) -> int:
        """0 where there is none."""
        return self._job.saver_pid if self._job else 0

    def _hear(self, term: Term) -> None:
        if term < self._term:
            raise StaleTerm(f"term {term} has been replaced by {self._term}; stop, another supervisor holds this job")
        if term > self._term:
            self._term = term
            self._outbox.wake()  # whoever polls with the old term learns it now
        if self._job is not None:
            self._job.rounds.heard()

    async def _carry_out(self, request: HostRequest) -> None:
        match request:
            case OpenHost():
                self._open(request)
            case PrepareSeats():
                self._opened().prepare(request)
            case FormGeneration():
                self._opened().form(request)
            case CloseGeneration():
                self._opened().close_generation(request.generation)
            case BeginJoin() | StopAfter() | SaveSoon() | SetPacing() | EndJoin():
                self._opened().pass_on(request)
            case KillRank():
                self._opened().kill(request)
            case LookAround():
                self._opened().look_around(request)
            case SelfTest(device=device):
                if not self._closing:
                    self._examination.begin(device)
            case InjectFault():
                self._opened().inject(request)
            case CloseHost():
                await self._close()
            case _:
                assert_never(request)

    def _open(self, order: OpenHost) -> None:
        if self._closing:
            raise EverstepError("this host has been closed; create another one")
        if self._job is not None:
            if order.job != self._job.id:
                raise EverstepError(f"this host serves job {self._job.id}, not {order.job}; create another one")
            self._job.say_opened()
            return
        try:
            secrets = SecretFolder(Path(order.secrets_dir)).environment(order.spec)
        except Refused as error:
            self._outbox.add(HostFailed(message=error.message))
            return
        self._outbox.veil = Veil(secrets.values())
        self._job = LocalJob(
            order,
            secrets,
            self._address,
            self._outbox,
            grace_s=self._isolation_grace_s,
            end=self._end,
            forsaken=self._forsaken,
        )
        self._job.start()

    def _opened(self) -> LocalJob:
        if self._job is None:
            raise EverstepError("this host has not been opened; send OpenHost first")
        return self._job

    # --- its end ----------------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        self._closing = True
        if self._job is not None:
            self._job.rounds.stop()
        await self._examination.close()
        if self._job is not None:
            await self._job.close()
        self._outbox.close()

    def _forsaken(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._close_and_end())

    async def _close_and_end(self) -> None:
        await self._close()
        self._end()
