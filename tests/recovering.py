"""A job that has trained for a few steps, and what its ranks report when their generation closes."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.domain.generation import RankReport
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.state import Reforming
from tests.builders import Bench, a_report, a_spec

Report = Callable[[Device], RankReport]
N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))


def trained(steps: int = 3, **degrees: int) -> Bench:
    return Bench(spec=a_spec(**(degrees or {"tp": 2, "pp": 2, "dp": 2}))).running().passed(*range(1, steps + 1))


def holding(step: int, generation: int = 1) -> Report:
    """A report of who has applied `step` and voted for nothing since."""
    return lambda device: a_report(device, generation=generation, voted=step, passed=step, held=step)


def waiting_to_apply(step: int) -> Report:
    return lambda device: a_report(device, voted=step, passed=step - 1, held=step - 1)


def reforming(bench: Bench) -> Reforming:
    assert isinstance(bench.state, Reforming)
    return bench.state


def restoring() -> Bench:
    bench = trained()
    bench.exited(bench.device(0)).prepared().all_report(holding(3))
    assert bench.form().generation == 2
    return bench
