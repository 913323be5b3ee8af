"""The simulator's constants from recoveries that were measured, and what it makes of the same failure with them.

What is compared is how the phases of a recovery are put together: which follow on each other, which go on side by side,
and where a pause begins and ends. How long each takes is the machine's affair, and is taken from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.job import Incident
from orchestrator.domain.profile import BLOCK, Line, Profile
from orchestrator.domain.rungs import Rung
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec

from .fleet import Fleet, Pace

IN_RANKS = ("deliver", "form", "build", "transfer", "gather")
"""One after another, between the order to form a generation and its being ready."""
STAGES = 2
STEPS = 20
"""Before the failure, and at most after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Seconds. ratio: simulated pause over measured one."""

    measured_s: float
    simulated_s: float
    rung: Rung | None

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.measured_s


def pace_of(incidents: Sequence[Incident], step_s: float) -> Pace:
    """Medians of what recoveries at the first attempt took, phase by phase. step_s: of an undisturbed step.

    Raises ValueError where there are none.
    """
    whole = [one for one in incidents if one.pause_s is not None and one.attempts == 1]
    if not whole:
        raise ValueError("no recovery that ended at its first attempt to take constants from; fail a rank and wait")

    def took(*names: str) -> float:
        return median(sum(one.phases.get(name, 0.0) for name in names) for one in whole)

    return Pace(
        step_s=step_s,
        detect_s=took("detect"),
        commit_s=0.0,  # inside all the others
        leave_s=took("settle"),
        fork_s=took("settle", "prepare"),
        form_s=took(*IN_RANKS),
        first_s=took("first_step") - step_s,  # less than none: who is ready early begins before the last one is
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


def calibrated(incidents: Sequence[Incident], step_s: float, devices: int) -> Calibration:
    """Of ranks that were killed, one after another, in a job on so many devices. Raises ValueError."""
    simulated_s, rung = killed_rank(pace_of(incidents, step_s), devices)
    pauses = [one.pause_s for one in incidents if one.pause_s is not None and one.attempts == 1]
    return Calibration(measured_s=median(pauses), simulated_s=simulated_s, rung=rung)
