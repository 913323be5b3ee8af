"""Samples of what is stored and sent about journals, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.checkpoint import Pacing, SaveCost
from orchestrator.domain.generation import RankReport, Unreadable
from orchestrator.domain.host_events import HostEvent, ShardNotSaved, ShardSaved
from orchestrator.domain.ids import Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.origin import FromCheckpoint
from orchestrator.domain.requests import FormGeneration, HostRequest, SetPacing
from orchestrator.domain.spec import CheckpointSpec

from .believed import NEWEST
from .samples import D1, G1, PLAN, RECORDS, REPORT, SHARD

PACING = Pacing(every=32, is_journal=True)
ENTRY = replace(NEWEST, step=Step(43), kind="journal", depth=3, path="/state/jobs/j/checkpoints/step-00000043.g1")
PART = replace(SHARD, kind="journal", write_s=0.25, stall_s=0.002)
REQUESTS: tuple[HostRequest, ...] = (
    SetPacing(generation=G1, device=D1, pacing=PACING),
    FormGeneration(
        generation=G1,
        plan=PLAN,
        addresses={D1: "127.0.0.1:4001"},
        restore=FromCheckpoint(checkpoint=ENTRY),
        committed=Step(43),
        pacing=PACING,
    ),
)
HOST_EVENTS: tuple[HostEvent, ...] = (
    ShardSaved(generation=G1, step=Step(44), shard=PART),
    ShardNotSaved(device=D1, generation=G1, step=Step(45), message="no room", is_skipped=True),
)
REPORTS: tuple[RankReport, ...] = (replace(REPORT, found=Unreadable(step=Step(43), generation=G1, since=Step(41))),)
RECORD: JobRecord = replace(
    RECORDS[-1],
    spec=replace(RECORDS[-1].spec, checkpoint=CheckpointSpec(policy="auto", every="auto")),
    checkpoint=ENTRY,
    older=(NEWEST,),
    pacing=PACING,
    pacing_told=G1,
    adrift=Step(45),
    base_asked=Step(45),
    complained=Step(45),
    costs=(SaveCost(kind="base", stall_s=0.01, write_s=0.75), SaveCost(kind="journal", stall_s=0.002, write_s=0.25)),
    saving={Step(44): (PART,)},
)
