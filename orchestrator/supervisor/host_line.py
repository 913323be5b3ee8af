"""The supervisor's line to one host: requests in order, one poll after another, trouble told as it is.

Knows nothing of jobs' states: what a silence or an end means is the kernel's to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from itertools import groupby

import structlog

from orchestrator.domain.errors import EverstepError, StaleTerm
from orchestrator.domain.events import Contact, EffectDone, HostClosed, HostHeard, HostLost, HostSaid, Input
from orchestrator.domain.host_events import StepsPassed
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.memo import Kept
from orchestrator.domain.requests import CloseHost, HostMessage, HostRequest, OpenHost, Together
from orchestrator.ports import Cluster, HostGone, HostUnreachable

POLL_S = 0.5
"""How long a host may hold a poll: its heartbeat."""
RETRY_S = 0.2

log = structlog.get_logger()
Tell = Callable[..., None]


class HostLine:
    """term: the supervisor's, which may be raised. refused: is called where the host obeys a later supervisor, or remembers
    what this one does not know. memo: the job as it is recorded, for the host to keep. knows: whether what a host remembers
    is known; is_met: that is certain.

    tell(input, urgent, number): hands an input to the loop; `number` is the host's, acknowledged once recorded.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        job: JobId,
        node: NodeId,
        term: Callable[[], Term],
        tell: Tell,
        refused: Callable[[], None],
        memo: Callable[[], str],
        knows: Callable[[Kept], bool],
        is_met: bool,
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._node = node
        self._term = term
        self._refused = refused
        self._tell = tell
        self._requests: asyncio.Queue[tuple[EffectId, HostRequest]] = asyncio.Queue()
        self._acked = 0
        self._memo = memo
        self._knows = knows
        self._is_met = is_met
        self._tasks: list[asyncio.Task[None]] = []
        self._opened = asyncio.Event()
        self._is_closing = False

    def start(self, *, attached: bool) -> None:
        """attached: the host was opened by an earlier supervisor, so polling can begin before any request."""
        if attached:
            self._opened.set()
        self._tasks = [asyncio.create_task(self._send_all()), asyncio.create_task(self._poll_all())]

    def send(self, effect: EffectId, request: HostRequest) -> None:
        self._is_closing = self._is_closing or isinstance(request, CloseHost)
        self._requests.put_nowait((effect, request))

    def acknowledge(self, number: int) -> None:
        self._acked = max(self._acked, number)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _send_all(self) -> None:
        while True:
            batch = [await self._requests.get()]
            while not self._requests.empty():
                batch.append(self._requests.get_nowait())
            for alike, together in groupby(batch, key=lambda one: not isinstance(one[1], OpenHost | CloseHost)):
                if alike:
                    await self._send(dict(together))
                else:  # a host's first and last request mean more than their delivery
                    for effect, request in together:
                        await self._send({effect: request})

    async def _send(self, requests: dict[EffectId, HostRequest]) -> None:
        effect, request = next(iter(requests.items()))
        message: HostMessage = request if len(requests) == 1 else Together(requests=requests)
        is_silent = False
        while True:
            try:
                if not self._is_met:
                    await self._meet(is_new=isinstance(request, OpenHost))
                # It remembers what it is asked for before it does it: a close ends all memory.
                memo = "" if isinstance(request, CloseHost) else self._memo()
                await self._cluster.call(self._job, self._node, self._term(), effect, message, memo)
            except HostGone as error:
                self._lost(Contact.GONE, str(error))
            except HostUnreachable as error:
                if not is_silent:
                    self._lost(Contact.UNREACHABLE, str(error))
                is_silent = True
                # What a host that is to be closed was asked before is moot: its close must not wait for that.
                if not self._is_closing or isinstance(request, CloseHost):
                    await asyncio.sleep(RETRY_S)
                    continue
            except StaleTerm:
                self._refused()
                return
            except EverstepError as error:
                # Repeating it would be refused again; what was asked for stays undone, and its deadline tells the kernel.
                log.error("host_refused", node=self._node, request=type(message).__name__, error=str(error))
            else:
                if is_silent:  # its polls may never have failed
                    self._tell(HostHeard(job=self._job, node=self._node), urgent=False)
                if isinstance(request, OpenHost):
                    self._opened.set()
            if isinstance(request, CloseHost):
                self._is_closing = False
                self._say(HostClosed(job=self._job, node=self._node))
            for done in requests:
                self._tell(EffectDone(job=self._job, effect=done), urgent=False)
            return

    async def _meet(self, *, is_new: bool = False) -> None:
        """Raises StaleTerm where the host remembers what this supervisor does not know: nothing may be asked of it then."""
        try:
            kept = await self._cluster.ask(self._job, self._node)
        except HostGone:
            if not is_new:
                raise
        else:
            if not self._knows(kept):
                raise StaleTerm(f"{self._node} remembers more of {self._job} than the store; begin anew")
        self._is_met = True

    async def _poll_all(self) -> None:
        """A host that ends may be followed by another of the same name, whose numbers start again."""
        while True:
            await self._opened.wait()
            await self._poll_one()

    async def _poll_one(self) -> None:
        """Until the host has ended."""
        after, is_heard, self._acked = 0, False, 0
        is_silent = False
        news: set[int] = set()
        """Numbers of what is no routine, until the host has heard what came of it."""
        while True:
            try:
                if not self._is_met:
                    await self._meet()
                acked = self._acked
                # What it may forget is in what it keeps. Steps are not worth that: a later vote proves that they passed.
                settled = {number for number in news if number <= acked}
                memo = self._memo() if settled else ""
                envelopes = await self._cluster.poll(self._job, self._node, self._term(), after, acked, POLL_S, memo)
                news -= settled
            except HostGone as error:
                self._opened.clear()
                self._lost(Contact.GONE, str(error))
                return
            except HostUnreachable as error:
                if not is_silent:
                    self._lost(Contact.UNREACHABLE, str(error))
                is_silent, is_heard = True, False
                await asyncio.sleep(RETRY_S)
                continue
            except StaleTerm:
                self._refused()
                log.warning("stale_term", node=self._node, term=self._term())
                self._opened.clear()
                return
            if not is_heard:
                self._tell(HostHeard(job=self._job, node=self._node), urgent=False)
            is_silent, is_heard = False, True
            for envelope in envelopes:
                after = max(after, envelope.number)
                said = HostSaid(job=self._job, node=self._node, event=envelope.event)
                is_urgent = not isinstance(envelope.event, StepsPassed)
                if is_urgent:
                    news.add(envelope.number)
                self._tell(said, urgent=is_urgent, line=self, number=envelope.number)

    def _lost(self, contact: Contact, message: str) -> None:
        self._say(HostLost(job=self._job, node=self._node, contact=contact, message=message))

    def _say(self, said: Input) -> None:
        self._tell(said, urgent=True)
