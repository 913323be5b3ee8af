"""Stage times of the running job are what it is planned by; without them, what its kinds are said to reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.balance import StageTime
from orchestrator.domain.kinds import KINDS
from orchestrator.planner.ask import Planned
from orchestrator.planner.constants import Measured
from orchestrator.planner.job import factors_of
from orchestrator.planner.search import search
from tests.planning import a_cluster, a_model, an_ask
from tests.unit.planner.test_strength import asked, chosen

TOOK = 0.08
"""Of four layers of 0.02 s on an A100."""


def seen(**seconds: float) -> tuple[StageTime, ...]:
    return tuple(StageTime(kind=kind, tp=1, first=0, last=4, seconds=each) for kind, each in seconds.items())


def ids_of(request: object) -> dict[str, int]:
    plan = chosen(request)  # type: ignore[arg-type]
    return {pipeline.stages[0].devices[0].node: len(pipeline.micro_batches) for pipeline in plan.pipelines}


def test_a_kind_that_is_slower_than_its_data_sheet_gets_fewer_ids_and_the_plan_says_why() -> None:
    request = asked(pp=1)
    half = replace(request, measured=seen(A100=TOOK, H100=TOOK / 3, B200=TOOK / 3))
    before, after = ids_of(request), ids_of(half)
    assert after["n3"] < before["n3"] and after["n0"] > before["n0"]
    reason = chosen(half).reason
    assert "stage times are measured" in reason and "A100 1 times" in reason and "B200 2.36 times" in reason
    assert "measured" not in chosen(request).reason


def test_noise_is_no_news() -> None:
    request = asked(pp=1)
    near = replace(request, measured=seen(A100=TOOK * 1.03, H100=TOOK * 312 / 989 * 0.98))
    assert [p.stages for p in chosen(near).pipelines] == [p.stages for p in chosen(request).pipelines]


def test_a_kind_that_was_not_seen_is_taken_to_be_as_far_off_as_the_others() -> None:
    spec = asked().spec
    model = a_model(2)
    pretended = Measured(layers={(kind, 1, spec.train.micro_batch_size): ((0.1, 0.2),) * 4 for kind in KINDS})
    found = factors_of(seen(A100=2.4), spec, model, pretended)
    assert found["A100"] == found["T4"] == pytest.approx(2.0, rel=0.05)
    assert factors_of(seen(A100=1.2), spec, model, pretended) == {} == factors_of((), spec, model, pretended)


def test_the_bound_is_one_whatever_was_measured() -> None:
    ask = an_ask(a_model(6), a_cluster(("A100", 2, 2), ("H100", 1, 2)), 24)
    for factor in (0.5, 1.0, 2.0):
        found = search(replace(ask, measured=Measured(factors={"A100": factor})))
        assert isinstance(found, Planned) and found.best.bound_s <= found.best.seconds
