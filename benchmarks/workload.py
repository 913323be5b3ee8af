"""The jobs that are measured: a model small enough that eight ranks of it step a few times a second on two cores.

fp32, no dropout, no checkpoints, real text, and more steps than anybody waits for: a benchmark ends a job, never the last
step. What is measured and how is not known here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from api.schemas import load_job_file
from orchestrator.domain.spec import JobSpec

WORLD_SIZE = 8
ENDLESS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job file with these sizes; mirrors: 0 or 1 second holders of what each rank owns; spares: nodes that stand by."""

    name: str
    width: int
    degrees: tuple[int, int, int]
    """tp, pp, dp."""
    layers: int = 4
    sequence: int = 128
    micro_batches: int = 8
    micro_batch_size: int = 1
    mirrors: int = 1
    spares: int = 0

    def job_file(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "program": "causal_lm",
            "data": {"files": ["{stdlib}/*.py"], "max_bytes": 2_000_000},
            "model": {
                "layers": self.layers,
                "width": self.width,
                "heads": 4,
                "kv_heads": 2,
                "ffn": self.width * 5 // 2,
            },
            "train": {
                "steps": ENDLESS,
                "micro_batches": self.micro_batches,
                "micro_batch_size": self.micro_batch_size,
                "sequence": self.sequence,
                "seed": 1,
                "learning_rate": 1e-3,
                "min_learning_rate": 1e-3,
            },
            "parallel": dict(zip(("tp", "pp", "dp"), self.degrees, strict=True)),
            "checkpoint": {"every": 0},
            "recovery": {"mirrors": self.mirrors, "spares": self.spares},
        }

    def spec(self) -> JobSpec:
        """As the server reads it, every default filled in."""
        return load_job_file(json.dumps(self.job_file()), "application/json")


def train_workload(degrees: tuple[int, int, int], mirrors: int) -> Workload:
    """Steps of 0.2 to 0.4 s on two quiet cores."""
    return Workload(name="bench-train", width=96, degrees=degrees, mirrors=mirrors)


def recovery_workload(spares: int = 0) -> Workload:
    """Steps of about 0.2 s on two quiet cores."""
    return Workload(name="bench-recovery", width=64, micro_batches=4, degrees=(2, 2, 2), spares=spares)
