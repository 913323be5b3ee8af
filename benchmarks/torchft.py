"""torchft as a peer: a lighthouse, and each replica under a torchrun of its own that starts it again when it dies.

The lighthouse's limits are short ones: what it is given here is its best, not its default of five seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .peer import Peer, free_port
from .torchrun import torchrun_command

HEARTBEAT_LIMIT_MS = 1000
LIGHTHOUSE = Path(sys.executable).with_name("torchft_lighthouse")
"""Only its own script can start it: it reads the process's words from the third on."""


class Torchft(Peer):
    def __init__(self, spec: Path, num_replicas: int, max_restarts: int) -> None:
        self._port = free_port()
        environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}"}
        super().__init__("torchft_job", spec.parent, environment)
        self._spec = spec
        self._num_replicas = num_replicas
        self._max_restarts = max_restarts

    def commands(self) -> Sequence[Sequence[str]]:
        limits = {
            "min_replicas": 2,
            "join_timeout_ms": 200,
            "quorum_tick_ms": 50,
            "heartbeat_timeout_ms": HEARTBEAT_LIMIT_MS,
        }
        said = [word for name, limit in limits.items() for word in (f"--{name}", str(limit))]
        lighthouse = [sys.executable, str(LIGHTHOUSE), *said, "--bind", f"127.0.0.1:{self._port}"]
        return [lighthouse, *(self._replica(number) for number in range(self._num_replicas))]

    def _replica(self, number: int) -> list[str]:
        arguments = [str(self._spec), str(number), str(self._num_replicas), str(self.log)]
        options = [f"--max-restarts={self._max_restarts}", "--monitor-interval=0.1"]
        return torchrun_command(self.name, 1, arguments, options)
