"""Planning beside an event loop: the pure functions on a thread, so that a large search delays no request."""

from __future__ import annotations

import asyncio

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.foresight import ClusterSketch, Forecast, PlanQuestion
from orchestrator.domain.ids import JobId
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.spec import JobSpec
from orchestrator.planner.afterwards import look_ahead
from orchestrator.planner.choose import choose, choose_alike
from orchestrator.planner.foresee import foresee
from orchestrator.planner.replan import Outlook
from orchestrator.planner.searched import is_searched

from .probe_process import SubprocessProber

MAX_OUTLOOKS = 64
"""Jobs whose next losses are searched for."""


class ThreadPlanner:
    """ignores_kinds: takes all devices for alike, for whoever compares with that.

    What follows from losses of a job with a searched plan is searched for once it has it, and is at hand when one happens.
    """

    def __init__(self, *, ignores_kinds: bool = False) -> None:
        self._choose = choose_alike if ignores_kinds else choose
        self._outlooks: dict[JobId, Outlook] = {}
        self._looking: dict[JobId, asyncio.Task[None]] = {}

    async def choose(self, request: ChoosePlan) -> Plan | Infeasible:
        found = await asyncio.to_thread(self._choose, request, self._outlooks.pop(request.job, None))
        if before := self._looking.pop(request.job, None):
            before.cancel()  # its thread ends by itself, and what it finds is of no use any more
        if isinstance(found, Plan) and is_searched(request):
            looking = asyncio.create_task(self._look_ahead(request))
            self._looking[request.job] = looking
            looking.add_done_callback(lambda _: self._looked(request.job, looking))
        return found

    async def _look_ahead(self, request: ChoosePlan) -> None:
        self._outlooks[request.job] = await asyncio.to_thread(look_ahead, request)
        while len(self._outlooks) > MAX_OUTLOOKS:
            del self._outlooks[next(iter(self._outlooks))]

    def _looked(self, job: JobId, looking: asyncio.Task[None]) -> None:
        if self._looking.get(job) is looking:
            del self._looking[job]


class ThreadForeseer:
    """Describes the program in a process of its own, then plans."""

    def __init__(self, prober: SubprocessProber) -> None:
        self._prober = prober

    async def foresee(self, spec: JobSpec, cluster: ClusterSketch) -> Forecast | Infeasible:
        """Raises Refused."""
        profile = await self._prober.describe(spec)
        return await asyncio.to_thread(foresee, PlanQuestion(spec=spec, profile=profile, cluster=cluster))
