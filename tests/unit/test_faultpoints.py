"""Fault points in one process: free when off, struck at their step, and told by the page of whoever died there."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.domain.faults import POINTS, FaultKind, FaultRequested
from orchestrator.domain.host_events import FaultCarriedOut
from orchestrator.domain.ids import Generation, Step
from worker import faultpoints
from worker.checkpoint.saver import POINTS as SAVER_POINTS
from worker.faultpoints import faultpoint
from worker.faults import ENVIRONMENT, Faults, InjectedError
from worker.page.layout import create_page
from worker.page.reader import PageReader
from worker.page.writer import PageWriter
from worker.progress import Phase


def test_every_point_in_the_code_has_a_name_that_can_be_asked_for_and_every_name_a_point() -> None:
    """Whether each is reached, tests/integration/test_fault_points.py finds out, and test_saver.py for the saver's."""
    code = [path.read_text() for path in Path(faultpoints.__file__).parent.rglob("*.py")]
    named = [name for text in code for name in re.findall(r'\bfaultpoint\("(\w+)"\)', text)]
    assert sorted(named) == sorted((*POINTS, *SAVER_POINTS)), "each at one place"


class Rig:
    def __init__(self) -> None:
        fd = create_page()
        self.page, self.reader = PageWriter(fd), PageReader(fd)
        os.close(fd)
        self.said: list[FaultCarriedOut] = []
        self.faults = Faults(self.page, self.said.append)

    def step(self, number: int) -> None:
        self.page.phase(Phase.COMPUTE, Generation(1), Step(number))
        for point in POINTS:
            faultpoint(point)


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield Rig()
    faultpoints.disarm()


def in_a_child(do: Callable[[], None]) -> int:
    """Its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        do()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("point", POINTS)
def test_whoever_is_killed_at_a_point_leaves_it_on_its_page(rig: Rig, point: str) -> None:
    rig.faults.take(FaultRequested(fault=FaultKind.KILL, at=point, step=Step(31)))

    def train() -> None:
        for number in range(29, 40):
            rig.step(number)

    assert in_a_child(train) == -signal.SIGKILL
    assert rig.reader.fault() == f"{point} of step 31"


def test_a_fault_of_the_environment_is_for_one_device_or_for_all(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "after_vote:2:n0/1")
    rig.faults.take_from_environment("n0/0")
    rig.step(3)
    rig.faults.take_from_environment("n0/1")
    assert in_a_child(lambda: rig.step(2)) == -signal.SIGKILL
    assert rig.reader.fault() == "after_vote of step 2"


def test_a_fault_strikes_once_and_the_points_are_free_again(rig: Rig) -> None:
    rig.faults.take(FaultRequested(fault=FaultKind.RAISE, at="in_vote", id="f1"))
    with pytest.raises(InjectedError, match="at in_vote of step 1"):
        rig.step(1)
    rig.step(2)
    assert [(said.id, said.step, said.refused) for said in rig.said] == [("f1", 1, False)]
    assert faultpoints._hook is None


def test_an_exit_is_the_programs_own(rig: Rig) -> None:
    rig.faults.take(FaultRequested(fault=FaultKind.EXIT, exit_code=7))
    assert in_a_child(lambda: rig.step(1)) == 7
    assert rig.reader.fault() == ""


def test_a_slow_rank_computes_factor_times_slower_for_a_while(rig: Rig) -> None:
    def computing(times: int) -> float:
        began = time.monotonic()
        for _ in range(times):
            spent = time.thread_time()
            while time.thread_time() < spent + 0.01:
                pass
            faultpoint("in_compute")
        return time.monotonic() - began

    rig.faults.take(FaultRequested(fault=FaultKind.SLOW, factor=6.0, duration_s=0.3))
    faultpoint("in_compute")
    assert computing(3) >= 3 * 0.06
    computing(10)
    assert faultpoints._hook is None, "it is over"


def test_nothing_to_spoil_is_said(rig: Rig) -> None:
    rig.faults.take(FaultRequested(fault=FaultKind.NAN, id="f1"))
    rig.step(1)
    assert rig.said[0].refused and rig.said[0].message == "nothing to spoil at in_compute of step 1"
