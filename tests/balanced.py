"""Samples of what is stored and sent about devices that are slow, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.balance import Rebalance, Remedy, Straggler
from orchestrator.domain.effects import ChoosePlan, Effect
from orchestrator.domain.events import StepRecord
from orchestrator.domain.host_events import HostEvent, StepsPassed
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.job import JobRecord

from .samples import ANSWER, AT, G1, JOB, NODE, PLAN, PROFILE, RECORDS, SPEC

DEVICE = Device(NODE, 0)
HOST_EVENTS: tuple[HostEvent, ...] = (StepsPassed(generation=G1, answers=(ANSWER,), at=(AT,), paces={DEVICE: 0.0625}),)
STEP_RECORD = StepRecord(
    job=JOB, generation=G1, at=AT, answer=ANSWER, tokens=2048, seconds=0.2, busy={DEVICE: 0.125, Device(NODE, 1): 0.1}
)
EFFECTS: tuple[Effect, ...] = (
    ChoosePlan(
        job=JOB,
        generation=G1,
        spec=SPEC,
        profile=PROFILE,
        devices=((DEVICE, "A100"),),
        running=PLAN,
        lost=((DEVICE, "A100"),),
        horizon_steps=1200.0,
        speeds={NODE: 0.5},
    ),
)
RECORD: JobRecord = replace(
    RECORDS[-1],
    stragglers={DEVICE: Straggler(usual_s=0.01, factor=2.5, since=AT, is_slow=False, times=2)},
    rebalance=Rebalance(
        remedy=Remedy.LAYERS, plan=PLAN, why="n0/0 is slow", before_s=1.5, expected_s=1.0, pause_s=0.25, from_step=Step(7)
    ),
    rebalanced_at=(AT, AT + 60),
    is_rebalanced=True,
    balance_told_at=AT + 5,
)
