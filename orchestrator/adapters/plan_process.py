"""Planning beside an event loop: the pure functions on a thread, so that a large search delays no heartbeat and no
request.
"""

from __future__ import annotations

import asyncio

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.foresight import ClusterSketch, Forecast, PlanQuestion
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.spec import JobSpec
from orchestrator.planner.choose import choose, choose_alike
from orchestrator.planner.foresee import foresee

from .probe_process import SubprocessProber


class ThreadPlanner:
    """ignores_kinds: takes all devices for alike, for whoever compares with that."""

    def __init__(self, *, ignores_kinds: bool = False) -> None:
        self._choose = choose_alike if ignores_kinds else choose

    async def choose(self, request: ChoosePlan) -> Plan | Infeasible:
        return await asyncio.to_thread(self._choose, request)


class ThreadForeseer:
    """Describes the program in a process of its own, then plans."""

    def __init__(self, prober: SubprocessProber) -> None:
        self._prober = prober

    async def foresee(self, spec: JobSpec, cluster: ClusterSketch) -> Forecast | Infeasible:
        """Raises Refused."""
        profile = await self._prober.describe(spec)
        return await asyncio.to_thread(foresee, PlanQuestion(spec=spec, profile=profile, cluster=cluster))
