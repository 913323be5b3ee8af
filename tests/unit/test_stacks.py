"""Where a process stands that is to be killed and does not say so itself: py-spy is asked, where there is one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from worker import processes
from worker.processes import stack_of

IGNORES = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
STANDS = """
import sys, time
def stands_here():
    print("up", flush=True)
    time.sleep(60)
stands_here()
"""
SPIED = 'Thread 1 (idle): "MainThread"'
Started = Callable[[str], int]


@pytest.fixture
def started() -> Iterator[Started]:
    processes: list[subprocess.Popen[str]] = []

    def start(prologue: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", prologue + STANDS], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process.pid

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def asked(pid: int, log: Path) -> tuple[str, ...]:
    pidfd = os.pidfd_open(pid)
    try:
        return asyncio.run(stack_of(pid, pidfd, log))
    finally:
        os.close(pidfd)


def py_spy(folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    """Nothing else is found beside it but what the script needs."""
    folder.mkdir()
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    patch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_of_one_that_handles_no_signals_py_spy_is_asked(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_spy(tmp_path / "bin", f"echo '{SPIED}'; echo \"    asked about $*\"", monkeypatch)
    monkeypatch.setattr(processes, "DUMP_S", 30.0)  # a busy machine takes its time to start a program
    pid = started(IGNORES)
    head, *stack = asked(pid, tmp_path / "log")
    assert f"process {pid}" in head
    assert stack == [SPIED, f"    asked about dump --nonblocking --pid {pid}"]


def test_a_py_spy_that_does_not_answer_is_not_waited_for(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_spy(tmp_path / "bin", "exec sleep 3600", monkeypatch)
    pid = started(IGNORES)
    before = psutil.Process().children()  # those of other tests, too
    assert len(asked(pid, tmp_path / "log")) == 1
    assert set(psutil.Process().children()) <= {*before}, "nothing of it is left"


def test_without_py_spy_there_is_only_the_systems_word(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pid = started(IGNORES)
    (only,) = asked(pid, tmp_path / "log")
    assert only.startswith(f"process {pid}: state ")
