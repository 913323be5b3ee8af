"""A peer: processes of another system, started here, stopped and continued by signals, ended by their ids.

Every process of it bears a mark of its own in the environment, which is how workers in sessions of their own are found. It
knows nothing of what the workers do but that they write a line per step (peers/ground.py).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from orchestrator.adapters.processes import ProcessId, end, marked

ROOT = Path(__file__).resolve().parent.parent
MARK = "EVERSTEP_BENCHMARK_PEER"
START_S = 180.0
"""Eight processes import torch on however few cores there are."""
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


class PeerFailed(RuntimeError):
    """A peer ended or stalled; it says where its output is and what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStep:
    at: float
    """Wall clock, s."""
    step: int
    norm: float
    rank: int
    pid: int
    cpu_s: float
    """Used by that process since it began."""
    members: int = 0
    """Replicas whose gradients are in it; 0 where that is always everybody."""


class Peer:
    """name: of a script of benchmarks.peers, which is given `log` last. Use as a context manager; `commands` is a
    subclass's."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.steps"
        self._output = folder / f"{name}.txt"
        self._mark = secrets.token_hex(8)
        self._environment = dict(os.environ if environment is None else environment)
        self._processes: list[subprocess.Popen[bytes]] = []

    def commands(self) -> Sequence[Sequence[str]]:
        """Each becomes a process, all at once."""
        raise NotImplementedError(f"{type(self).__name__} has no commands; give it some")

    def start(self) -> None:
        with self._output.open("wb") as output:
            for command in self.commands():
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        cwd=ROOT,
                        env={**self._environment, MARK: self._mark, "OMP_NUM_THREADS": "1"},
                        start_new_session=True,
                        preexec_fn=_die_with_parent(os.getpid()),
                    )
                )

    def steps(self) -> list[PeerStep]:
        """Every line that is complete, in order of writing."""
        try:
            lines = self.log.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [parsed(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int, timeout_s: float = START_S) -> None:
        """Until anybody has done it. Raises PeerFailed."""
        deadline = time.monotonic() + timeout_s
        while not any(done.step >= step for done in self.steps()):
            self.check()
            if time.monotonic() > deadline:
                raise PeerFailed(f"{self.name} did not reach step {step} within {timeout_s:g} s: {self.last_words()}")
            time.sleep(_POLL_S * 5)

    def check(self) -> None:
        """Raises PeerFailed where something that was started has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise PeerFailed(f"{self.name} ended with {process.returncode}: {self.last_words()}")

    def processes(self) -> tuple[ProcessId, ...]:
        """Every living one of it, whatever starts the workers included."""
        return marked({MARK: self._mark})

    def stop(self) -> None:
        """Nothing of it runs until `go`."""
        self._send(signal.SIGSTOP)

    def go(self) -> None:
        self._send(signal.SIGCONT)

    def close(self) -> None:
        """Every process of it ends. Idempotent."""
        deadline = time.monotonic() + 10
        while found := self.processes():
            end(found, grace_s=0)
            if time.monotonic() > deadline:
                raise PeerFailed(f"processes {[process.pid for process in found]} of {self.name} do not end")
        for process in self._processes:
            process.wait(10)

    def last_words(self, lines: int = 12) -> str:
        try:
            said = self._output.read_text(errors="replace").strip().splitlines()
        except OSError:
            said = []
        return "\n".join(said[-lines:]) or "it said nothing"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes():
            process.send(number)


def parsed(line: str) -> PeerStep:
    """A line of a peer's log. Raises ValueError."""
    at, step, norm, rank, pid, cpu, members = line.split()
    return PeerStep(
        at=float(at), step=int(step), norm=float(norm), rank=int(rank), pid=int(pid), cpu_s=float(cpu), members=int(members)
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)

    return ask
