"""A forecast is of the plan that the job gets: on one kind, several, processors; and that is near the search's best."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given as given_
from hypothesis import settings
from hypothesis import strategies as st

from orchestrator.domain.balance import StageTime
from orchestrator.domain.foresight import ClusterSketch, Forecast, NodeSketch, PlanQuestion
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.profile import Divisor, Line, Profile
from orchestrator.domain.spec import Exact
from orchestrator.planner.afterwards import current_of
from orchestrator.planner.ask import Planned
from orchestrator.planner.choose import choose
from orchestrator.planner.foresee import foresee, request_of
from orchestrator.planner.job import ask_of, machines_of
from orchestrator.planner.search import Benches, search
from tests.builders import a_profile, a_spec

KINDS = ("cpu", "A100", "H100", "B200")
nodes = st.lists(
    st.builds(
        NodeSketch,
        kind=st.sampled_from(KINDS),
        count=st.integers(1, 3),
        devices=st.integers(1, 4),
        speed=st.sampled_from((1.0, 1.0, 0.5)),
    ),
    min_size=1,
    max_size=3,
)


def asked(
    cluster: tuple[NodeSketch, ...],
    ids: int,
    *,
    layer_s: float = 0.0,
    exact: Exact = False,
    is_here: bool = False,
    **parallel: int | None,
) -> PlanQuestion:
    spec = a_spec(micro_batches=ids)
    spec = replace(
        spec,
        train=replace(spec.train, emulated_layer_s=layer_s, exact=exact),
        parallel=replace(spec.parallel, **parallel),  # type: ignore[arg-type]
    )
    return PlanQuestion(spec=spec, profile=a_profile(6), cluster=ClusterSketch(nodes=cluster, is_here=is_here))


def got(question: PlanQuestion) -> Plan | Infeasible:
    """What the job gets there."""
    return choose(request_of(question, machines_of(question.cluster)))


def work(plan: Plan) -> set[str]:
    return {
        f"stage {number} of {len(one.stages)}: layers {stage.first}-{stage.last - 1}"
        for one in plan.pipelines
        for number, stage in enumerate(one.stages, start=1)
    }


def agree(question: PlanQuestion) -> None:
    plan, forecast = got(question), foresee(question)
    if isinstance(plan, Infeasible):
        assert isinstance(forecast, Infeasible) and forecast.reason.startswith(plan.reason), (forecast, plan)
        return
    assert isinstance(forecast, Forecast), forecast
    depths = "/".join(str(depth) for depth in sorted({len(one.stages) for one in plan.pipelines}))
    assert forecast.shape.startswith(f"tp{plan.tp} x pp{depths} x dp{plan.dp},")
    assert forecast.reason.startswith(plan.reason)
    assert forecast.pipelines == len(plan.pipelines) and forecast.devices == plan.world_size
    assert forecast.ids == tuple(sorted({len(one.micro_batches) for one in plan.pipelines}, reverse=True))
    assert {said.split(", ")[0] for row in forecast.rows for said in row.work if said != "idle"} == work(plan)
    assert sum(row.used * row.nodes for row in forecast.rows) == plan.world_size
    assert sum(forecast.causes.values()) == pytest.approx(forecast.step_s)


@settings(max_examples=60, deadline=None)
@given_(
    cluster=nodes,
    ids=st.integers(1, 24),
    layer_s=st.sampled_from((0.0, 0.0, 0.02)),
    exact=st.sampled_from((False, "best_effort", True)),
    is_here=st.booleans(),
    tp=st.sampled_from((None, None, 1, 2)),
    pp=st.sampled_from((None, None, 1, 3)),
    most=st.sampled_from((0, 0, 5)),
)
def test_a_job_gets_the_plan_that_was_shown(
    cluster: list[NodeSketch],
    ids: int,
    layer_s: float,
    exact: Exact,
    is_here: bool,
    tp: int | None,
    pp: int | None,
    most: int,
) -> None:
    agree(asked(tuple(cluster), ids, layer_s=layer_s, exact=exact, is_here=is_here, tp=tp, pp=pp, max_devices=most))


def large(question: PlanQuestion) -> PlanQuestion:
    """Of a model that devices are busy with."""
    lines = [
        Line(name=f"{layer}.weight", shape=(4096, 12 * 4096), split=True, layers=(layer,), decay=True)
        for layer in range(24)
    ]
    heads = (Divisor(field="model.heads", value=32),)
    profile = Profile(num_layers=24, lines=tuple(lines), divisors=heads, activation_bytes=34 * 4096 * 2048)
    train = replace(question.spec.train, sequence=2048, dtype="bf16", activation_checkpointing=True)
    return replace(question, profile=profile, spec=replace(question.spec, train=train))


def test_on_one_kind_a_job_with_few_micro_batches_gets_the_best_plan_there_is() -> None:
    """Rectangles are up to a third slower there."""
    slower = []
    for nodes, ids in ((3, 8), (3, 10), (4, 16), (8, 36)):
        question = large(asked((NodeSketch(kind="H100", count=nodes, devices=8),), ids))
        cluster, benches = machines_of(question.cluster), Benches()
        request = request_of(question, cluster)
        ask = ask_of(request.spec, question.profile, cluster)
        found, plan, even = search(ask, benches), choose(request), choose(replace(request, spec=question.spec))
        assert isinstance(found, Planned) and isinstance(plan, Plan) and isinstance(even, Plan)
        priced = [current_of(one, cluster, ask, benches) for one in (plan, even)]
        assert priced[0] is not None and priced[0].proposal.seconds <= found.best.seconds * 1.02
        slower.append(priced[1].proposal.seconds / found.best.seconds if priced[1] else 0.0)
    assert max(slower) > 1.1, slower


def test_processors_that_share_a_machine_are_shown_the_even_plan_and_what_would_be_faster() -> None:
    cluster = (NodeSketch(kind="A100", count=2, devices=1), NodeSketch(kind="H100", count=1, devices=1))
    question = large(asked(cluster, 24, is_here=True, tp=1, pp=3))
    forecast = foresee(question)
    assert isinstance(forecast, Forecast) and forecast.ids == (24,) and "fastest estimate" in forecast.reason
    assert any("count as alike" in one.why for one in forecast.alternatives), forecast.alternatives
    there = foresee(replace(question, cluster=replace(question.cluster, is_here=False)))
    assert isinstance(there, Forecast) and there.step_s < forecast.step_s
    assert any("train.device" in said for said in there.advice)


def test_stages_that_were_seen_to_take_longer_get_fewer_layers_on_one_kind_too() -> None:
    question = large(asked((NodeSketch(kind="H100", count=3, devices=1),), 24, tp=1, pp=3))
    request = request_of(question, machines_of(question.cluster))
    even = choose(request)
    assert isinstance(even, Plan)

    def seen(last: float) -> tuple[StageTime, ...]:
        """last: how many times as long as other layers those of the last stage take."""
        times = (0.0125, 0.0126, 0.0125 * last)
        stages = zip(even.pipelines[0].stages, times, strict=True)
        return tuple(
            StageTime(kind="H100", tp=1, first=one.first, last=one.last, seconds=each * (one.last - one.first))
            for one, each in stages
        )

    before, cut = even.pipelines[0].stages[2], choose(replace(request, measured=seen(2.0)))
    assert isinstance(cut, Plan)
    after = cut.pipelines[0].stages[2]
    assert after.last - after.first <= before.last - before.first - 2
    usual, noise = (choose(replace(request, measured=seen(last))) for last in (1.0, 1.01))
    assert isinstance(usual, Plan) and isinstance(noise, Plan) and noise.pipelines == usual.pipelines
