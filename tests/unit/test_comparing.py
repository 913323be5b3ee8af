"""When copies are compared and which micro-batch is computed twice: of a step's number and the plan alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from orchestrator.domain.ids import Rank, Step
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import RecoverySpec
from tests.builders import a_device
from worker.integrity import Check, Copies, check_of


class Pair:
    """A session, as far as comparing asks it whom it has."""

    def __init__(self, mirrors: int) -> None:
        self.mirror_of = self.mirrored = Rank(1) if mirrors else None


def due(every: int, *, mirrors: int = 1, saving: bool = False) -> list[int]:
    copies = Copies(cast(Any, Pair(mirrors)), RecoverySpec(compare_every=every))
    return [step for step in range(1, 31) if copies.is_due(Step(step), saving)]


def test_copies_are_compared_every_so_many_steps_and_before_each_checkpoint() -> None:
    assert due(10) == [10, 20, 30] and RecoverySpec().compare_every == 10
    assert due(1) == due(7, saving=True) == due(0, saving=True) == list(range(1, 31))
    assert due(0) == due(7, mirrors=0) == due(7, mirrors=0, saving=True) == []


def a_plan(*cuts: tuple[int, ...]) -> Plan:
    """A pipeline for each, of two ids; cuts: where its stages end."""
    pipelines = []
    for number, ends in enumerate(cuts):
        stages = tuple(
            Stage(first=first, last=last, devices=(a_device(number, place),))
            for place, (first, last) in enumerate(zip((0, *ends), ends, strict=False))
        )
        pipelines.append(Pipeline(stages=stages, micro_batches=(2 * number, 2 * number + 1)))
    return Plan(pipelines=tuple(pipelines))


def test_pipelines_that_are_cut_alike_take_turns_and_each_is_checked_by_another() -> None:
    plan = a_plan((2, 4), (4,), (2, 4), (4,))
    checks = [check_of(plan, Step(step)) for step in range(8)]
    assert checks[:4] == [
        Check(number=0, checked=0, checker=2),
        Check(number=2, checked=1, checker=3),
        Check(number=4, checked=2, checker=0),
        Check(number=6, checked=3, checker=1),
    ]
    assert checks[4:] == checks[:4]


@pytest.mark.parametrize("plan", [a_plan((4,)), a_plan((2, 4), (4,))])
def test_where_no_other_pipeline_is_cut_alike_nothing_is_computed_twice(plan: Plan) -> None:
    assert check_of(plan, Step(3)) is None
    assert check_of(replace(plan, pipelines=(*plan.pipelines, *a_plan((3, 4)).pipelines)), Step(3)) is None


torch.set_num_threads(1)
