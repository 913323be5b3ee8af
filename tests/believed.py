"""Samples of what is stored and sent about checkpoints, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.checkpoint import After, Canary
from orchestrator.domain.effects import NoteCheckpoint, OnDisk, PruneCheckpoints
from orchestrator.domain.events import CheckpointsPruned, Input
from orchestrator.domain.generation import RankReport, Unreadable
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.job import JobRecord

from .samples import AT, CHECKPOINT, G1, JOB, RECORDS, REPORT

NEWEST = replace(CHECKPOINT, total_bytes=1200, new_bytes=300, seconds=0.5, at=AT, bits="tp2 on A100", after=(2.5, 2.25))
OLDER = replace(CHECKPOINT, step=Step(30), path="/state/jobs/j/checkpoints/step-00000030.g1", is_proven=True)
EFFECTS: tuple[OnDisk, ...] = (
    NoteCheckpoint(job=JOB, checkpoint=NEWEST),
    PruneCheckpoints(job=JOB, keep=(NEWEST, OLDER), condemned=("a/1.pack", "a/2.pack"), doomed=("a/1.pack",)),
)
RECORD: JobRecord = replace(
    RECORDS[-1],
    checkpoint=NEWEST,
    older=(OLDER,),
    canary=Canary(checkpoint=NEWEST, failed="1 of 2 micro-batches"),
    distrusted=1,
    void=Generation(3),
    after={Step(50): After(losses=(2.0, 2.5), bits="tp2 on A100")},
    condemned={"a/1.pack": AT},
)
REPORTS: tuple[RankReport, ...] = (replace(REPORT, found=Unreadable(step=Step(40), generation=G1)),)
INPUTS: tuple[Input, ...] = (CheckpointsPruned(job=JOB, condemnable=("a/3.pack",), deleted=("a/1.pack",)),)
