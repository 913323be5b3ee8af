"""Plans that fit, refusals that say why, and the same answer whatever the order of the devices."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, Generation, JobId
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.profile import Line, Profile
from orchestrator.domain.spec import Exact, JobSpec
from orchestrator.planner.choose import choose
from tests.builders import a_device, a_profile, a_spec

GIB = 1 << 30


def ask(
    nodes: list[int], spec: JobSpec, *, profile: Profile | None = None, kind: str = "cpu", keep: tuple[Device, ...] = ()
) -> ChoosePlan:
    """nodes: devices of each."""
    devices = [(a_device(node, index), kind) for node, size in enumerate(nodes) for index in range(size)]
    return ChoosePlan(
        job=JobId("job"),
        generation=Generation(1),
        spec=spec,
        profile=profile or a_profile(),
        devices=tuple(devices),
        keep=keep,
    )


def planned(request: ChoosePlan) -> Plan:
    found = choose(request)
    assert isinstance(found, Plan), found
    return found


def refused(request: ChoosePlan) -> Infeasible:
    found = choose(request)
    assert isinstance(found, Infeasible), found
    return found


def test_wanted_degrees_are_kept() -> None:
    plan = planned(ask([2, 2, 2, 2], a_spec(tp=2, pp=2, dp=2)))
    assert (plan.tp, plan.pp, plan.dp) == (2, 2, 2)
    assert sorted(plan.devices) == [a_device(node, index) for node in range(4) for index in range(2)]


def test_tp_groups_never_leave_a_node() -> None:
    plan = planned(ask([3, 3, 2], a_spec(tp=2, pp=1, micro_batches=6)))
    assert plan.dp == 3
    assert all(len({device.node for device in stage.devices}) == 1 for p in plan.pipelines for stage in p.stages)
    assert refused(ask([1, 1, 2], a_spec(tp=2, pp=2))).reason == (
        "needs 2 devices on one node 2 times (tp2 x pp2 x dp1), there is 1 such set; lower tp or wait for a node"
    )


def test_too_few_devices_says_how_many_and_what_would_help() -> None:
    found = refused(ask([2, 2, 2], a_spec(tp=2, pp=2, dp=2)))
    assert found.reason == "needs 8 devices, 6 usable; lower dp or wait for a node" and not found.forever
    assert (
        refused(ask([2], a_spec(min_devices=3))).reason == "needs 3 devices, 2 usable; lower min_devices or wait for a node"
    )
    assert refused(ask([2], a_spec(pp=3))).reason == "needs 3 devices, 2 usable; lower pp or wait for a node"
    assert refused(ask([], a_spec())).reason == "needs 1 devices, 0 usable; lower min_devices or wait for a node"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (a_spec(tp=3), "parallel.tp 3 does not divide model.heads 4"),
        (a_spec(pp=5, micro_batches=8), "parallel.pp 5 exceeds the program's 4 layers"),
        (a_spec(pp=3, dp=2, micro_batches=4), "parallel.pp 3 exceeds the 2 micro-batches of a pipeline"),
        (a_spec(dp=5, micro_batches=4), "parallel.dp 5 exceeds train.micro_batches 4"),
    ],
)
def test_what_no_cluster_could_run_is_refused_for_ever(spec: JobSpec, why: str) -> None:
    found = refused(ask([8] * 8, spec))
    assert found.forever and why in found.reason


@pytest.mark.parametrize(
    ("spec", "most", "would"),
    [
        (
            a_spec(tp=2, micro_batches=8, min_devices=5),
            5,
            "5 to 5 devices, and with 8 micro-batches .*; 4 or 6 would be",
        ),
        (
            a_spec(tp=1, pp=2, micro_batches=4, min_devices=5),
            0,
            "5 devices or more, .* 4 micro-batches .*; 4 would be",
        ),
    ],
)
def test_sizes_that_no_plan_has_are_said_with_those_nearby(spec: JobSpec, most: int, would: str) -> None:
    spec = replace(spec, parallel=replace(spec.parallel, max_devices=most))
    found = refused(ask([4, 4, 4], spec))
    assert re.search(would, found.reason) and "change min_devices or max_devices" in found.reason and not found.forever


def test_every_pipeline_gets_at_least_as_many_ids_as_it_has_stages() -> None:
    plan = planned(ask([1] * 8, a_spec(pp=2, micro_batches=5)))
    assert plan.dp == 2
    assert sorted(i for p in plan.pipelines for i in p.micro_batches) == list(range(5))
    assert all(len(p.micro_batches) >= len(p.stages) for p in plan.pipelines)


def test_a_model_too_big_for_one_device_is_cut() -> None:
    line = Line(name="w", shape=(1024, 300_000), split=True, layers=(0,), decay=True)
    other = replace(line, name="v", layers=(1,))
    big = Profile(num_layers=2, lines=(line, other), divisors=(), activation_bytes=0)
    found = refused(ask([1], a_spec(), profile=big))
    assert re.search(r"needs .* GiB on a cpu, 3.7 GiB are usable; add nodes", found.reason) and not found.forever
    plan = planned(ask([4, 4], a_spec(), profile=big))
    assert plan.tp * plan.pp > 1


def test_a_stage_with_more_than_its_share_is_not_averaged_away() -> None:
    """Two layers of one and three parts: half of both is not what the second stage holds."""
    small = Line(name="w", shape=(1024, 70_000), split=False, layers=(0,), decay=True)
    heavy = replace(small, name="v", shape=(1024, 210_000), layers=(1,))
    profile = Profile(num_layers=2, lines=(small, heavy), divisors=(), activation_bytes=0)
    found = refused(ask([1, 1], a_spec(pp=2, mirrors=0), profile=profile))
    assert re.search(r"needs 4\.0 GiB on a cpu \(layers 1-1\), 3\.7 GiB are usable; raise pp", found.reason)


def test_devices_that_hold_state_are_preferred() -> None:
    keep = (a_device(2, 0), a_device(2, 1), a_device(3, 0), a_device(3, 1))
    plan = planned(ask([2, 2, 2, 2], a_spec(tp=2, pp=2, dp=1), keep=keep))
    assert set(plan.devices) == set(keep)


def mixed(spec: JobSpec, counts: dict[str, int], keep: tuple[Device, ...] = ()) -> ChoosePlan:
    """Nodes of two devices, the first kind's first."""
    kinds = [kind for kind, nodes in counts.items() for _ in range(nodes)]
    devices = tuple((a_device(node, index), kind) for node, kind in enumerate(kinds) for index in range(2))
    return replace(ask([], spec, keep=keep), devices=devices)


def exactly(exact: Exact, **degrees: int) -> JobSpec:
    spec = a_spec(**degrees)
    return replace(spec, train=replace(spec.train, exact=exact))


def on_cuda(spec: JobSpec) -> JobSpec:
    return replace(spec, train=replace(spec.train, device="cuda"))


def test_a_faster_kind_takes_more_ids_where_devices_are_real_and_as_many_where_they_are_emulated() -> None:
    # Large enough that its kind decides how long a layer takes, not the launch of its kernels.
    lines = tuple(Line(name=str(layer), shape=(8192, 8192), split=True, layers=(layer,), decay=True) for layer in range(4))
    profile = Profile(num_layers=4, lines=lines, divisors=(), activation_bytes=1 << 20)
    wide = a_spec(tp=1, pp=1, micro_batches=512)
    wide = replace(wide, train=replace(wide.train, sequence=4096))
    counts = {"A100": 1, "B200": 1}
    real = planned(replace(mixed(on_cuda(wide), counts), profile=profile))
    kinds = dict(mixed(wide, counts).devices)
    ids = {kind: [len(p.micro_batches) for p in real.pipelines if kinds[p.stages[0].devices[0]] == kind] for kind in counts}
    assert min(ids["B200"]) > 2 * max(ids["A100"]) and sum(map(sum, ids.values())) == 512
    assert "fastest of" in real.reason
    emulated = planned(replace(mixed(wide, counts), profile=profile))
    assert {len(p.micro_batches) for p in emulated.pipelines} == {128}


def test_a_mixed_plan_stays_on_devices_that_hold_state() -> None:
    keep = (a_device(2, 0), a_device(2, 1))
    request = mixed(on_cuda(a_spec(tp=2, pp=1, dp=1)), {"A100": 3, "L4": 1}, keep=keep)
    assert set(planned(request).devices) == set(keep)
    assert choose(request) == choose(replace(request, devices=request.devices[::-1]))


def test_an_exact_job_runs_on_one_kind_of_device() -> None:
    plan = planned(mixed(exactly(True, tp=2), {"A100": 1, "H100": 2}))
    assert set(plan.devices) == {a_device(node, index) for node in (1, 2) for index in range(2)}
    assert plan.reason.endswith("on 4 usable devices; H100 alone (A100 unused), because train.exact is true")
    held = planned(mixed(exactly(True, tp=2), {"A100": 1, "H100": 2}, keep=(a_device(0, 0),)))
    assert set(held.nodes) == {a_device(0, 0).node}, "it stays on the kind that it has bits of"
    too_small = mixed(exactly(True, tp=2, pp=2), {"A100": 1, "H100": 2}, keep=(a_device(0, 0),))
    assert set(planned(too_small).nodes) == {a_device(node, 0).node for node in (1, 2)}
    assert planned(mixed(exactly("best_effort", dp=3, tp=2, micro_batches=6), {"A100": 1, "H100": 2})).world_size == 6


def test_an_exact_job_that_fits_no_single_kind_waits_and_says_so() -> None:
    found = refused(mixed(exactly(True, tp=2, pp=2, dp=2), {"A100": 1, "H100": 3}))
    assert not found.forever
    assert found.reason == (
        "train.exact is true, which takes one kind of device: on H100 alone it needs 8 devices, 6 usable; lower dp or wait "
        "for a node; on A100 alone it needs 8 devices, 2 usable; lower dp or wait for a node; or set it to best_effort"
    )


def test_an_exact_job_never_cuts_a_block() -> None:
    found = refused(ask([4, 4], exactly(True, tp=4)))
    assert found.forever and "parallel.tp 4 cuts 0.weight (384 elements) inside one" in found.reason
    assert planned(ask([4, 4], exactly(True))).tp in (1, 2)
    assert planned(ask([4, 4], exactly(False, tp=4))).tp == 4


def test_degrees_that_make_too_few_or_too_many_devices_name_the_number_that_would_do() -> None:
    found = refused(ask([5], a_spec(dp=3, min_devices=4, micro_batches=48)))
    assert found.reason == "needs 6 devices by parallel.dp 3, 5 usable; lower dp or min_devices, or wait for a node"


def test_it_says_why_and_what_stays_idle() -> None:
    assert (
        planned(ask([2, 2, 2], a_spec(tp=2, pp=2))).reason
        == "tp2 x pp2 x dp1 is the fastest estimate on 6 usable devices, 2 idle"
    )


nodes = st.lists(st.integers(1, 4), min_size=1, max_size=5)
degrees = st.one_of(st.none(), st.sampled_from([1, 2, 4]))


@settings(max_examples=60, deadline=None)
@given(nodes, degrees, degrees, st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_devices_changes_nothing(
    sizes: list[int], tp: int | None, pp: int | None, micro_batches: int, rng: object
) -> None:
    request = ask(sizes, a_spec(tp=tp, pp=pp, micro_batches=micro_batches))
    shuffled = list(request.devices)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(request) == choose(replace(request, devices=tuple(shuffled)))


@settings(max_examples=80, deadline=None)
@given(nodes, degrees, st.integers(1, 4), st.integers(1, 8), st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_every_plan_is_whole(sizes: list[int], tp: int | None, pp: int, micro_batches: int, widths: list[int]) -> None:
    """Each stage has a layer, stages follow each other, each id and each device is used once, whatever the layers weigh."""
    lines = tuple(
        Line(name=str(layer), shape=(4 * width, 3), split=True, layers=(layer,), decay=True)
        for layer, width in enumerate(widths)
    )
    profile = Profile(num_layers=len(widths), lines=lines, divisors=a_profile().divisors, activation_bytes=0)
    found = choose(ask(sizes, a_spec(tp=tp, pp=pp, micro_batches=micro_batches), profile=profile))
    if isinstance(found, Infeasible):
        assert "; lower" in found.reason or "; choose" in found.reason or "; raise" in found.reason
        return
    assert len(set(found.devices)) == found.world_size
    assert sorted(i for p in found.pipelines for i in p.micro_batches) == list(range(micro_batches))
    for pipeline in found.pipelines:
        bounds = [0, *(stage.last for stage in pipeline.stages)]
        assert bounds[-1] == len(widths)
        assert [(stage.first, stage.last) for stage in pipeline.stages] == list(pairwise(bounds))
        assert all(first < last for first, last in pairwise(bounds))
