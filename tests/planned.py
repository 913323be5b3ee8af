"""Samples of what is stored about plans with shares of the state and measured stage times, for golden files."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.balance import StageTime
from orchestrator.domain.effects import ChoosePlan, Effect
from orchestrator.domain.ids import Device
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.state import JobState, Running

from .samples import G1, JOB, NODE, PLAN, PROFILE, SPEC

PLAN_WITH_SHARES = Plan(
    pipelines=tuple(
        Pipeline(stages=(Stage(first=0, last=2, devices=(Device(NODE, i),), shares=shares),), micro_batches=(i,))
        for i, shares in enumerate(((2500, 4000), (7500, 6000)))
    ),
    reason="the faster owns more",
)
STATES: tuple[JobState, ...] = (Running(generation=G1, plan=PLAN_WITH_SHARES),)
EFFECTS: tuple[Effect, ...] = (
    ChoosePlan(
        job=JOB,
        generation=G1,
        spec=SPEC,
        profile=PROFILE,
        devices=((Device(NODE, 0), "A100"),),
        running=replace(PLAN_WITH_SHARES, reason=PLAN.reason),
        measured=(StageTime(kind="A100", tp=2, first=0, last=2, seconds=0.0625),),
    ),
)
