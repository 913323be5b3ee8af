"""The simulator's constants from recoveries that were measured, and what it makes of the same failures with them.

What is compared is how the phases of a recovery are put together: which follow on each other, which go on side by side,
and where a pause begins and ends. How long each took up to the new generation is the machine's affair, and is taken from
that very failure; how much longer the first step takes than others is predicted, from the other failures. So what a busy
machine does to one recovery is in both, and cannot be taken for an error of the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.incident import Incident
from orchestrator.domain.profile import BLOCK, Line, Profile
from orchestrator.domain.rungs import Rung
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec

from .fleet import Fleet
from .pace import Pace

IN_RANKS = ("deliver", "form", "build", "transfer", "gather")
"""One after another, between the order to form a generation and its being ready."""
STAGES = 2
STEPS = 20
"""Before the failure, and at most after it."""
LEAST = 3
"""Failures from which anything can be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A recovery that was measured, and what a step took before it, in seconds."""

    incident: Incident
    step_s: float

    @property
    def is_whole(self) -> bool:
        """It ended, at its first attempt, and its ledger says how long its first step took."""
        one = self.incident
        return one.pause_s is not None and one.attempts == 1 and "first_step" in one.phases

    @property
    def later_s(self) -> float:
        """By which its first step took longer than others; less than none where ranks began before the last was ready."""
        return self.incident.phases["first_step"] - self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Medians, seconds. ratio: of simulated pause over measured one, failure by failure."""

    kills: int
    measured_s: float
    simulated_s: float
    ratio: float
    rung: Rung | None


def pace_of(one: Killed, later_s: float) -> Pace:
    """The constants of one recovery; later_s: by how much its first step is to take longer than others."""
    phases = one.incident.phases

    def took(*names: str) -> float:
        return sum(phases.get(name, 0.0) for name in names)

    return Pace(
        step_s=one.step_s,
        detect_s=took("detect"),
        commit_s=0.0,  # inside all the others
        leave_s=took("settle"),
        fork_s=took("settle", "prepare"),
        form_s=took(*IN_RANKS),
        first_s=later_s,
        bytes_s=float("inf"),
    )


def killed_rank(pace: Pace, devices: int) -> tuple[float, Rung | None]:
    """The pause after a rank's end on a machine that is well, by the job's own ledger, and the way out that was taken."""
    lines = tuple(
        Line(name=f"stage{i}", shape=(BLOCK * devices,), split=False, layers=(i,), decay=True) for i in range(STAGES)
    )
    spec = JobSpec(
        name="calibration",
        program="causal_lm",
        data=DataSpec(files=("*.txt",)),
        train=TrainSpec(steps=10**6, micro_batches=devices, micro_batch_size=1, sequence=8),
        parallel=ParallelSpec(tp=1, pp=STAGES, dp=devices // STAGES),
        checkpoint=CheckpointSpec(every=0),
        recovery=RecoverySpec(mirrors=1),
    )
    nodes = [Node(id=NodeId(f"n{i}"), kind="cpu", num_devices=1) for i in range(devices)]
    fleet = Fleet(spec, Profile(num_layers=STAGES, lines=lines, divisors=(), activation_bytes=64), nodes, pace, dense=True)
    trains_at = pace.open_s + pace.plan_s + 60.0
    fleet.run_until(trains_at + STEPS * pace.step_s)
    fleet.lose_rank(Device(NodeId("n0"), 0), "killed", pace.detect_s)
    fleet.run_until(fleet.now + 60.0 + STEPS * pace.step_s)
    incident = fleet.record.incidents[-1]
    assert incident.pause_s is not None, "the simulated job has recovered"
    return incident.pause_s, incident.rung


def calibrated(kills: Sequence[Killed], devices: int) -> Calibration:
    """Of ranks that were killed, one after another, in a job on so many devices. Raises ValueError."""
    whole = [one for one in kills if one.is_whole]
    if len(whole) < LEAST:
        raise ValueError(f"{len(whole)} recoveries ended at their first attempt, {LEAST} are needed; kill more ranks")
    measured, simulated = [one.incident.pause_s or 0.0 for one in whole], []
    for number, one in enumerate(whole):
        others = [other.later_s for other in (*whole[:number], *whole[number + 1 :])]
        pause_s, rung = killed_rank(pace_of(one, median(others)), devices)
        simulated.append(pause_s)
    return Calibration(
        kills=len(whole),
        measured_s=median(measured),
        simulated_s=median(simulated),
        ratio=median(told / real for told, real in zip(simulated, measured, strict=True)),
        rung=rung,
    )
