"""Samples of what is stored and sent about held-out text, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.generation import Evaluation
from orchestrator.domain.host_events import HostEvent, RankFinished, StepsPassed
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import EvaluationSpec

from .samples import ANSWER, AT, G1, NODE, RECORDS, SPEC

FOUND = Evaluation(step=Step(40), loss=2.5)
STRANGE = Evaluation(step=Step(41), loss=None)
HOST_EVENTS: tuple[HostEvent, ...] = (
    StepsPassed(
        generation=G1, answers=(replace(ANSWER, evaluation=FOUND), replace(ANSWER, evaluation=STRANGE)), at=(AT, AT)
    ),
    RankFinished(device=Device(NODE, 0), generation=G1, step=Step(40), evaluation=FOUND),
)
RECORD: JobRecord = replace(
    RECORDS[-1], spec=replace(SPEC, evaluation=EvaluationSpec(every=10, micro_batches=4)), evaluation=STRANGE
)
