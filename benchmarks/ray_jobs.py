"""Ray's own Jobs API, for comparison: a head with its dashboard and one CPU, started apart and taken down again."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import TracebackType
from typing import Any, Self

from orchestrator.adapters.embedded_redis import free_port
from orchestrator.adapters.processes import end, marked

MARK = "EVERSTEP_BENCHMARK"
READY_S = 120.0


class RayJobs:
    """Its dashboard listens on loopback and asks for a token, as ours does."""

    def __init__(self) -> None:
        self._folder = Path(mkdtemp(prefix="ers-", dir="/tmp"))
        self._name = secrets.token_hex(8)
        self._token = secrets.token_hex(16)
        self._port = free_port()

    def __enter__(self) -> Self:
        token = self._folder / "token"
        token.write_text(self._token)
        token.chmod(0o600)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            MARK: self._name,
        }
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
            *(f"--port={free_port()}", "--include-dashboard=true", f"--dashboard-port={self._port}", "--num-cpus=2"),
            *("--dashboard-host=127.0.0.1", f"--temp-dir={self._folder}", f"--object-store-memory={100 << 20}"),
        ]
        with (self._folder / "log").open("wb") as log:
            subprocess.Popen(command, env=plain | variables, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self._ask("GET", "/api/version")
                return self
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    words = (self._folder / "log").read_text()[-500:]
                    self.close()
                    raise RuntimeError(f"Ray's dashboard does not answer ({error}): {words}") from error
            time.sleep(0.3)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        end(marked({MARK: self._name}), grace_s=5)
        end(marked({MARK: self._name}), grace_s=0)
        rmtree(self._folder, ignore_errors=True)

    def submit_latencies_s(self, count: int) -> list[float]:
        """Of submissions one after the other; the first, which starts what is not there yet, is left out."""
        taken = []
        for _ in range(count + 1):
            began = time.perf_counter()
            self._ask("POST", "/api/jobs/", {"entrypoint": "true"})
            taken.append(time.perf_counter() - began)
        return taken[1:]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)
