"""A supervisor's line to a simulated host: requests in order, events as they come, trouble told as the real line does."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from orchestrator.domain.errors import StaleTerm
from orchestrator.domain.events import Contact, EffectDone, HostClosed, HostHeard, HostLost, HostSaid, Input
from orchestrator.domain.host_events import StepsPassed
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.memo import Memo
from orchestrator.domain.requests import CloseHost, HostRequest, OpenHost

from .host import SimHost
from .world import World

LATENCY_S = (0.001, 0.01)
LATE_S = (0.2, 2.0)
LATE = 0.01
LOST_REPLY = 0.02
WATCH_S = 0.3
SILENCE_S = 0.8
RETRY_S = 0.5


class Teller(Protocol):
    """A supervisor, as far as its lines know it."""

    @property
    def term(self) -> Term: ...
    def tell(self, one: Input, *, urgent: bool, line: SimLine | None = None, number: int = 0) -> None: ...
    def memo(self, job: JobId) -> Memo | None: ...
    def knows(self, host: SimHost) -> bool: ...
    def is_refused(self) -> None: ...
    def when_awake(self, do: object) -> None: ...


class SimLine:
    def __init__(self, world: World, supervisor: Teller, job: JobId, node: NodeId, attached: bool) -> None:
        self.supervisor = supervisor
        self.world = world
        self.job = job
        self.node = node
        self.stopped = False
        self.opened = attached
        self._requests: deque[tuple[EffectId, HostRequest]] = deque()
        self._sending = False
        self._fetching = False
        self._after = 0
        self._acked = 0
        self._news: set[int] = set()
        """Numbers of what is no routine and not known to be recorded where the host can see it."""
        self._met: SimHost | None = None
        self._silent_since: float | None = None
        self._told_silent = False
        self._told_gone = False
        if attached:
            self._listen()

    def send(self, effect: EffectId, request: HostRequest) -> None:
        self._requests.append((effect, request))
        self._send_next()

    def acknowledge(self, number: int) -> None:
        self._acked = max(self._acked, number)

    def stop(self) -> None:
        self.stopped = True

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _send_next(self) -> None:
        if not self._sending and self._requests and not self.stopped:
            self._sending = True
            self._later(self._try)

    def _try(self) -> None:
        effect, request = self._requests[0]
        host = self._host(create=isinstance(request, OpenHost))
        if host is None or (host.is_gone and self.world.clock.now >= host.silent_until):
            if not (host is not None and host.is_closed):
                self._tell(HostLost(job=self.job, node=self.node, contact=Contact.GONE, message="its process has ended"))
        elif not host.is_reachable:
            self._tell(HostLost(job=self.job, node=self.node, contact=Contact.UNREACHABLE, message="no answer"))
            self._later(self._try, RETRY_S)
            return
        else:
            if not self._meet(host):
                self._later(self._try, RETRY_S)
                return
            try:
                if not isinstance(request, CloseHost):
                    self._have_kept(host)
                host.handle(self.supervisor.term, effect, request)
            except StaleTerm:
                self.supervisor.is_refused()
                return
            if self.world.rng.random() < LOST_REPLY:
                self._later(self._try, RETRY_S)
                return
            if isinstance(request, OpenHost) and not self.opened:
                self.opened = True
                self._listen()
        if isinstance(request, CloseHost):
            self._tell(HostClosed(job=self.job, node=self.node))
        self._tell(EffectDone(job=self.job, effect=effect), urgent=False)
        self._requests.popleft()
        self._sending = False
        self._send_next()

    # --- events -----------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        host = self._host()
        if host is not None:
            host.outbox.wake = self._wake
        self._wake()
        self.world.clock.after(WATCH_S, self._watch)

    def _wake(self) -> None:
        if not self._fetching and not self.stopped:
            self._fetching = True
            self._later(self._fetch)

    def _fetch(self) -> None:
        self._fetching = False
        host = self._host()
        if host is None or not host.is_reachable:
            return
        if not self._meet(host):
            return
        try:
            if any(number <= self._acked for number in self._news):
                self._have_kept(host)
            envelopes = host.fetch(self.supervisor.term, self._after, self._acked)
        except StaleTerm:
            self.stopped = True
            self.supervisor.is_refused()
            return
        for envelope in envelopes:
            self._after = envelope.number
            said = HostSaid(job=self.job, node=self.node, event=envelope.event)
            urgent = not isinstance(envelope.event, StepsPassed)
            if urgent:
                self._news.add(envelope.number)
            self.supervisor.tell(said, urgent=urgent, line=self, number=envelope.number)

    def _meet(self, host: SimHost) -> bool:
        """Whether what the host remembers is known; nothing is asked of one that remembers more."""
        if self._met is not host and not self.supervisor.knows(host):
            return False
        self._met = host
        return True

    def _have_kept(self, host: SimHost) -> None:
        """What is forgotten by the host from here on, and what is asked of it, follows from what it keeps."""
        memo = self.supervisor.memo(self.job)
        if memo is not None:
            host.keep(self.supervisor.term, memo)
        self._news = {number for number in self._news if number > self._acked}

    def _watch(self) -> None:
        """What a poll that stays unanswered comes to."""
        if self.stopped or self._told_gone:
            return
        self.world.clock.after(WATCH_S, self._watch)
        host, now = self._host(), self.world.clock.now
        if host is None or (host.is_gone and now >= host.silent_until):
            self._told_gone = True
            self._tell(HostLost(job=self.job, node=self.node, contact=Contact.GONE, message="its process has ended"))
        elif not host.is_reachable:
            if self._silent_since is None:
                self._silent_since = now
            elif now - self._silent_since > SILENCE_S and not self._told_silent:
                self._told_silent = True
                self._tell(HostLost(job=self.job, node=self.node, contact=Contact.UNREACHABLE, message="silent"))
        else:
            if self._told_silent:
                self._tell(HostHeard(job=self.job, node=self.node), urgent=False)
            self._silent_since, self._told_silent = None, False
            self._wake()

    def _host(self, create: bool = False) -> SimHost | None:
        return self.world.host(self.job, self.node, create=create)

    def _tell(self, one: Input, urgent: bool = True) -> None:
        if not self.stopped:
            self.supervisor.tell(one, urgent=urgent)

    def _later(self, do: object, delay_s: float | None = None) -> None:
        rng = self.world.rng
        delay = delay_s if delay_s is not None else rng.uniform(*(LATE_S if rng.random() < LATE else LATENCY_S))
        self.world.clock.after(delay, lambda: None if self.stopped else self.supervisor.when_awake(do))
