"""The supervisor process: observe, let the kernel decide, commit, carry out. One asyncio loop around one pure function.

It decides nothing itself. A supervisor that loses its lease stops at once; its successor loads the same records, carries
out what is still in their outboxes, and polls the same hosts: nothing restarts because a supervisor did.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import structlog

from orchestrator.domain.attic import Retention, Retired
from orchestrator.domain.effects import CallHost, Effect
from orchestrator.domain.errors import EverstepError, StaleTerm, Unavailable, WentBack
from orchestrator.domain.events import Contact, DeadlinePassed, EffectDone, HostLost, Input, InstantCame, NodesSeen
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.kinds import DeviceKind
from orchestrator.domain.memo import MAX_REIGNS, Reign
from orchestrator.domain.requests import OpenHost
from orchestrator.domain.state import TERMINAL
from orchestrator.ports import Commit

from .acting import Hands, World
from .deadlines import deadlines, instants
from .host_line import HostLine
from .kernel import State, Stepped, step
from .recalling import recalled
from .rewriting import whole
from .unsaved import LAZY_S, News, Unsaved
from .witnesses import Witnesses

LEASE_S = 6.0
NODES_S = 1.0
"""How often the cluster is looked at."""
RETRY_COMMIT_S = 0.2
STOPPED_S = 1.0
"""A wait that took this much longer than asked for: nobody was running here."""
POLL_COMMANDS_S = 5.0
PATIENT_S, ASK_AGAIN_S = 30.0, 0.5
"""For how long the others are waited for where some remember more than the store, and how often they are asked."""
HEARD_S = 1.5
"""In which every host that can be reached has answered a poll."""
MAX_ENDED = 1000
"""Jobs that have ended whose records are remembered."""
RETIRE_S = 60.0
"""How often it is looked for finished jobs that are old enough for the archive."""

log = structlog.get_logger()


class LeaseLost(EverstepError):
    """Another supervisor may hold the jobs now; this one must not do anything more."""


class Supervisor:
    def __init__(
        self,
        *,
        world: World,
        root: str,
        holder: str,
        clock: Callable[[], float] = time.time,
        checks: bool = False,
        retention: Retention = Retention(),
        rows: tuple[DeviceKind, ...] = (),
    ) -> None:
        """checks: nodes are checked before they are used. rows: kinds of device besides those that everybody knows."""
        self._world = world
        self._root = root
        self._holder = holder
        self._retention = retention
        self._clock = clock
        self._news: list[News] = []
        self._urgent = asyncio.Event()
        self._any = asyncio.Event()
        self._lines: dict[tuple[JobId, NodeId], HostLine] = {}
        self._timers: dict[tuple[JobId | None, str], float] = {}
        """Of jobs, and of the cluster: when they ring, on the monotonic clock."""
        self._hands = Hands(world, lambda one: self._tell(one, urgent=True))
        self._term = Term(0)
        self._fence = asyncio.Lock()
        """Held by whoever shows the term to the store, or raises it."""
        self._commits = 0
        """That the store has confirmed."""
        self._renewed_at = 0.0
        self._replaced = asyncio.Event()
        """A host obeys a later supervisor."""
        self._cursor = ""
        self._witnesses = Witnesses(world.cluster)
        self._ended: dict[JobId, JobRecord] = {}
        """The latest jobs that have, as they were recorded."""
        self._checks = checks
        self._rows = rows
        self._state = State(root=root, checks=checks, rows=rows)
        self._unsaved = Unsaved()

    async def serve(self) -> None:
        """Runs until cancelled. Raises LeaseLost when it is no longer the one; starting again is the remedy."""
        self._term = await self._acquire()
        self._renewed_at = time.monotonic()
        log.info("lease_acquired", holder=self._holder, term=self._term)
        loaded = await self._world.store.load()
        self._commits, self._cursor = loaded.commits, loaded.cursor
        self._witnesses.reigns = loaded.reigns
        self._witnesses.record(loaded.jobs, loaded.commits)
        self._state = State(
            jobs=loaded.jobs,
            root=self._root,
            quarantine={one.device: one for one in loaded.quarantine},
            cordons={one.node: one for one in loaded.cordons},
            admissions={one.node: one for one in loaded.admissions},
            checks=self._checks,
            rows=self._rows,
            projects={one.name: one for one in loaded.projects},
        )
        try:
            await self._recall()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_lease())
                tasks.create_task(self._begin_anew_where_refused())
                tasks.create_task(self._read_commands(loaded.cursor))
                tasks.create_task(self._watch_nodes())
                tasks.create_task(self._retire_old())
                self._adopt()
                tasks.create_task(self._loop())
        finally:
            for line in self._lines.values():
                await line.stop()
            self._hands.cancel()
            await self._world.store.release(self._holder, self._term)

    # --- the loop ---------------------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        while True:
            has_gathered = await self._wait_for_news()
            news, self._news = self._news, []
            self._urgent.clear()
            self._any.clear()
            now = self._clock() + self._hands.skew_s
            stepped = step(now, self._state, [one.one for one in news])
            self._state = stepped.state
            self._unsaved.add(stepped, news, time.monotonic())
            # Nothing is done before it is recorded; what leads to nothing yet can be recorded with what follows. Should
            # this process end first, hosts and Redis say it again to its successor: it has not been acknowledged.
            if has_gathered or stepped.effects or stepped.loose or time.monotonic() >= self._unsaved.due:
                await self._save()
            self._follow_hosts()
            for identity, effect in stepped.effects.items():
                self._carry_out(identity, effect)
            for loose in stepped.loose:
                self._hands.provide(loose)
            self._set_timers(stepped)
            awaited = instants(self._state.cordons, self._state.jobs.values(), now, self._state.admissions)
            self._set_timers_of(None, awaited)

    async def _wait_for_news(self) -> bool:
        """Urgent news at once, routine news after a moment, deadlines when they come.

        Whether that moment is over: then what has come has had its company, and is not worth another.
        """
        has_gathered = False
        began = time.monotonic()
        soonest = min([self._unsaved.due, *self._timers.values()])
        timeout = None if soonest == inf else max(0.0, soonest - began)
        try:
            async with asyncio.timeout(timeout):
                await self._any.wait()
        except TimeoutError:
            pass
        else:
            try:
                async with asyncio.timeout(LAZY_S):
                    await self._urgent.wait()
            except TimeoutError:
                has_gathered = True
        now = time.monotonic()
        if timeout is not None and (overslept := now - began - timeout - LAZY_S) > STOPPED_S:
            # This process was stopped: reports may be waiting unread, so deadlines go on from where they were.
            self._timers = {key: at + overslept for key, at in self._timers.items()}
        for (job, key), at in list(self._timers.items()):
            if at <= now:
                del self._timers[job, key]
                self._news.append(News(DeadlinePassed(job=job, key=key) if job is not None else InstantCame(key=key)))
        return has_gathered

    async def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, Unsaved()
        await self._commit(unsaved.commit())
        unsaved.acknowledge()

    async def _commit(self, commit: Commit) -> None:
        if commit.is_empty:
            return
        async with self._fence:
            await self._write(commit)

    async def _write(self, commit: Commit) -> None:
        while True:
            try:
                self._commits = await self._world.store.commit(self._term, commit)
                self._cursor = commit.cursor or self._cursor
                self._witnesses.record(commit.jobs, self._commits)
                self._ended |= {job: record for job, record in commit.jobs.items() if isinstance(record.state, TERMINAL)}
                while len(self._ended) > MAX_ENDED:
                    del self._ended[next(iter(self._ended))]
                return
            except Unavailable as error:
                # Training goes on meanwhile: nobody below needs an answer to make progress.
                log.warning("store_unavailable", error=str(error))
                await asyncio.sleep(RETRY_COMMIT_S)
            except WentBack as error:
                commit = await self._all_again(commit, str(error))
            except StaleTerm as error:
                raise LeaseLost(str(error)) from error

    async def _all_again(self, commit: Commit, why: str) -> Commit:
        """All that the store has forgotten, with what was to be written, under a term above all that it has forgotten.

        Raises LeaseLost where another supervisor holds the jobs by now, or has: of that such a store may know nothing.
        """
        store = self._world.store
        if time.monotonic() - self._renewed_at > LEASE_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARD_S):
                    await self._replaced.wait()
        if self._replaced.is_set():
            raise LeaseLost("the store went back, and hosts obey a later supervisor")
        while True:
            try:
                await self._overtake(self._term, self._commits, self._witnesses.reigns)
                log.warning("store_went_back", error=why, term=self._term)
                over = await store.over(self._ended)
            except Unavailable as error:
                log.warning("store_unavailable", error=str(error))
                await asyncio.sleep(RETRY_COMMIT_S)
                continue
            ended = {job: record for job, record in self._ended.items() if job not in over}
            return whole(self._state, ended, commit, self._cursor, self._witnesses.reigns, self._clock(), why)

    async def _overtake(self, above: Term, commits: int, earlier: tuple[Reign, ...]) -> None:
        """Go on from what these reigns led to, under a term that nobody has heard of. Raises LeaseLost, Unavailable."""
        reign = Reign(term=Term(0), by=self._name(), commits=commits, at=self._clock())
        reigns = (*earlier, reign)[-MAX_REIGNS:]
        term = await self._world.store.overtake(self._holder, self._term, above, LEASE_S)
        if term is None:
            raise LeaseLost("another supervisor holds the lease")
        self._term, self._renewed_at = term, time.monotonic()
        self._witnesses.reigns = (*reigns[:-1], replace(reign, term=term))

    # --- what hosts remember ----------------------------------------------------------------------------------------------

    async def _recall(self) -> None:
        """Go on from what hosts remember where that is more than what the store does. Raises LeaseLost, Unavailable."""
        until = time.monotonic() + PATIENT_S
        while True:
            kept, gone, is_complete = await self._witnesses.ask(
                (job, node) for job, record in self._state.jobs.items() for node in record.hosts
            )
            over = await self._world.store.over({one.job for one in kept})
            found = recalled(self._state.jobs, over, kept, self._witnesses.reigns, self._commits)
            if found is None:
                return
            if is_complete or time.monotonic() >= until:
                break
            if not await self._world.store.renew(self._holder, self._term, LEASE_S):
                raise LeaseLost("another supervisor holds the lease")
            await asyncio.sleep(ASK_AGAIN_S)
        why = "hosts remember more than the store, which went back while nobody looked"
        await self._overtake(found.above, found.commits, found.reigns)
        self._commits = found.commits
        log.warning("store_went_back", error=why, term=self._term)
        for job, node in sorted(found.strays):
            await self._witnesses.end(job, node, self._term)
        inputs = [
            HostLost(job=job, node=node, contact=Contact.GONE, message="its process has ended")
            for job, record in found.jobs.items()
            for node in sorted(record.hosts)
            if (job, node) in gone | found.strays
        ]
        held = {device: one for device, one in self._state.quarantine.items() if device not in found.used}
        stepped = step(self._clock(), replace(self._state, jobs=found.jobs, quarantine=held), inputs)
        self._state = stepped.state
        unsaved = Unsaved()
        unsaved.add(stepped, [], time.monotonic())
        ended = {job: record for job, record in stepped.changed.items() if isinstance(record.state, TERMINAL)}
        await self._commit(
            whole(self._state, ended, unsaved.commit(), self._cursor, self._witnesses.reigns, self._clock(), why)
        )

    async def _begin_anew_where_refused(self) -> None:
        """A host obeys a later supervisor, or remembers more, while the store has this one for the latest: it went back."""
        await self._replaced.wait()
        while True:
            try:
                async with self._fence:
                    is_latest = await self._world.store.renew(self._holder, self._term, LEASE_S)
            except Unavailable as error:
                log.warning("lease_not_renewed", error=str(error))
                await asyncio.sleep(RETRY_COMMIT_S)
                continue
            if is_latest:
                raise LeaseLost("hosts know more than the store: it went back; the next supervisor begins with them")
            return  # as whoever renews the lease finds out too

    def _set_timers(self, stepped: Stepped) -> None:
        for job in stepped.changed:
            self._set_timers_of(job, deadlines(stepped.state.jobs[job]) if job in stepped.state.jobs else {})

    def _set_timers_of(self, job: JobId | None, wanted: Mapping[str, float]) -> None:
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer[0] == job and timer[1] not in wanted]:
            del self._timers[timer]
        for key, seconds in wanted.items():
            self._timers.setdefault((job, key), now + seconds)

    def _adopt(self) -> None:
        """Take up what an earlier supervisor left: poll its hosts, carry out what it had committed, restart deadlines."""
        self._follow_hosts(attached=True)
        now = time.monotonic()
        for job, record in self._state.jobs.items():
            log.info("job_adopted", job=job, state=type(record.state).__name__, step=record.committed)
            for identity, effect in record.outbox.items():
                self._carry_out(identity, effect)
            self._timers.update({(job, key): now + seconds for key, seconds in deadlines(record).items()})

    # --- hosts ------------------------------------------------------------------------------------------------------------

    def _follow_hosts(self, *, attached: bool = False) -> None:
        """A line to every host a job has asked for; none to others."""
        wanted = {(job, node) for job, record in self._state.jobs.items() for node in record.hosts}
        for key in wanted - set(self._lines):
            line = HostLine(
                cluster=self._world.cluster,
                job=key[0],
                node=key[1],
                term=lambda: self._term,
                tell=self._tell,
                refused=self._replaced.set,
                memo=partial(self._witnesses.memo, key[0]),
                knows=self._witnesses.knows,
                is_met=self._witnesses.has_met(*key),
            )
            self._lines[key] = line
            line.start(attached=attached and not _opening(self._state.jobs[key[0]], key[1]))
        for key in set(self._lines) - wanted:
            self._hands.start(self._lines.pop(key).stop())

    def _tell(self, one: Input, *, urgent: bool, line: HostLine | None = None, number: int = 0) -> None:
        self._news.append(News(one, line, number))
        self._any.set()
        if urgent:
            self._urgent.set()

    # --- effects ----------------------------------------------------------------------------------------------------------

    def _carry_out(self, identity: EffectId, effect: Effect) -> None:
        match effect:
            case CallHost(job=job, node=node, request=request):
                line = self._lines.get((job, node))
                if line is None:  # closed or lost meanwhile
                    self._tell(EffectDone(job=job, effect=identity), urgent=False)
                else:
                    line.send(identity, request)
            case _:
                self._hands.carry_out(identity, effect)

    # --- what is watched --------------------------------------------------------------------------------------------------

    async def _acquire(self) -> Term:
        while True:
            try:
                term = await self._world.store.acquire(self._holder, LEASE_S, by=self._name(), at=self._clock())
            except Unavailable as error:
                log.warning("store_unavailable", error=str(error))
                term = None
            if term is not None:
                return term
            await asyncio.sleep(LEASE_S / 10)

    def _name(self) -> str:
        """Of a reign, which no other has."""
        return f"{self._holder} {secrets.token_hex(8)}"

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                async with self._fence:
                    if not await self._world.store.renew(self._holder, self._term, LEASE_S):
                        # Its term has been replaced; or the store went back, to before that.
                        why = "it went back: it knew this supervisor's term no more"
                        await self._write(await self._all_again(Commit(), why))
                    self._renewed_at = time.monotonic()
            except Unavailable as error:
                # No other supervisor can have taken it through the same store; commits are fenced by the term anyway.
                log.warning("lease_not_renewed", error=str(error))

    async def _read_commands(self, cursor: str) -> None:
        while True:
            try:
                commands = await self._world.store.commands(cursor, POLL_COMMANDS_S)
            except Unavailable as error:
                log.warning("store_unavailable", error=str(error))
                await asyncio.sleep(RETRY_COMMIT_S)
                continue
            for cursor, command in commands:
                self._news.append(News(command, cursor=cursor))
            if commands:
                self._any.set()
                self._urgent.set()

    async def _retire_old(self) -> None:
        """Archive finished jobs once their time has come, their logs with them."""
        while True:
            try:
                async with self._fence:
                    retired = await self._world.store.retire(self._term, self._clock(), self._retention)
            except Unavailable as error:
                log.warning("jobs_not_archived", error=str(error))
                retired = Retired()
            except StaleTerm as error:
                raise LeaseLost(str(error)) from error
            for job in retired.archived:
                log.info("job_archived", job=job)
                await asyncio.to_thread(shutil.rmtree, Path(self._root) / "jobs" / job / "logs", ignore_errors=True)
            await asyncio.sleep(RETIRE_S if not (retired.archived or retired.forgotten) else RETRY_COMMIT_S)

    async def _watch_nodes(self) -> None:
        seen = None
        while True:
            try:
                nodes = await self._world.cluster.nodes()
            except (OSError, EverstepError) as error:
                log.warning("nodes_unknown", error=str(error))
            else:
                if nodes != seen:
                    seen = nodes
                    self._tell(NodesSeen(nodes=nodes), urgent=True)
            await asyncio.sleep(NODES_S)


def _opening(record: JobRecord, node: NodeId) -> bool:
    """Whether the host's first request has not been carried out yet: then it must come before any poll."""
    return any(
        isinstance(effect, CallHost) and effect.node == node and isinstance(effect.request, OpenHost)
        for effect in record.outbox.values()
    )
