"""What a rank has started ends with the rank, whoever ends it, and a number that is nobody's any more is left alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from orchestrator.domain.ids import Device, Generation, NodeId
from worker.parentage import end_session, reaped
from worker.seat import open_seat


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def a_leader_and_its_child() -> tuple[int, int]:
    """A process in a session of its own, and one that it has started; both sleep."""
    reader, writer = os.pipe()
    leader = os.fork()
    if leader == 0:
        os.setsid()
        child = os.fork()
        if child:
            os.write(writer, str(child).encode())
        while True:
            time.sleep(60)
    child = int(os.read(reader, 32))
    os.close(reader)
    os.close(writer)
    return leader, child


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_a_rank_that_its_host_kills_leaves_nothing_behind(tmp_path: Path) -> None:
    leader, child = a_leader_and_its_child()
    seat, fds = open_seat(1, Device(NodeId("n0"), 0), Generation(1), "127.0.0.1", tmp_path)
    seat.take(leader, os.pidfd_open(leader))
    seat.kill("asked for")
    assert ends(child)
    assert reaped(leader) == -signal.SIGKILL
    seat.close()
    for fd in fds:
        os.close(fd)


def test_a_rank_that_ends_by_itself_leaves_nothing_behind_once_it_is_reaped() -> None:
    leader, child = a_leader_and_its_child()
    os.kill(leader, signal.SIGTERM)
    assert ends(leader) and is_running(child)
    assert reaped(leader) == -signal.SIGTERM
    assert ends(child)


def test_a_process_that_leads_no_session_is_spared() -> None:
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(60)
    end_session(child)
    assert is_running(child)
    os.kill(child, signal.SIGKILL)
    assert reaped(child) == -signal.SIGKILL
