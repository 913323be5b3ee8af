"""Ray Train v2 as a peer: a driver that starts a Ray of its own, on loopback and behind a token, and a trainer on it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.adapters import ray_environment
from orchestrator.adapters.ray_environment import CLUSTER_MARK

from .peer import ROOT, Peer

HEALTH_CHECK_INTERVAL_S = 0.2
"""A tenth of its default: what it is given here is its best."""


class RayTrain(Peer):
    def __init__(self, spec: Path, num_workers: int, max_failures: int) -> None:
        self._ray = ray_environment.for_state_dir(spec.parent / "raytrain")
        variables = self._ray.variables(os.environ) | {
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(HEALTH_CHECK_INTERVAL_S),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        del variables[CLUSTER_MARK]  # no cluster of ours: the peer's own mark finds its processes
        super().__init__("raytrain_job", spec.parent, variables)
        self._arguments = (str(spec), str(num_workers), str(max_failures), str(self._ray.temp_dir))

    def commands(self) -> Sequence[Sequence[str]]:
        return [[sys.executable, "-m", f"benchmarks.peers.{self.name}", *self._arguments, str(self.log)]]

    def start(self) -> None:
        ray_environment.prepare(self._ray)
        super().start()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._ray.temp_dir, ignore_errors=True)
