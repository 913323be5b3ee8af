"""Planning beside the supervisor's loop: the pure function on a thread, so that a large search delays no heartbeat."""

from __future__ import annotations

import asyncio

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.planner.choose import choose


class ThreadPlanner:
    async def choose(self, request: ChoosePlan) -> Plan | Infeasible:
        return await asyncio.to_thread(choose, request)
