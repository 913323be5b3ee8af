"""What a rung of the recovery ladder leaves of a job's speed: by what plans there are and what devices reach."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.balance import StageTime
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, Generation, JobId
from orchestrator.domain.plan import Plan
from orchestrator.planner.choose import choose
from orchestrator.planner.strength import replaced, throughput
from tests.builders import a_device, a_profile, a_spec

KINDS = ("A100", "A100", "H100", "B200")


def asked(kinds: tuple[str, ...] = KINDS, *, layer_s: float = 0.02, **parallel: int) -> ChoosePlan:
    spec = a_spec(tp=1, micro_batches=24)
    spec = replace(spec, train=replace(spec.train, emulated_layer_s=layer_s), parallel=replace(spec.parallel, **parallel))
    devices = tuple((a_device(number), kind) for number, kind in enumerate(kinds))
    return ChoosePlan(job=JobId("j"), generation=Generation(1), spec=spec, profile=a_profile(), devices=devices)


def chosen(request: ChoosePlan) -> Plan:
    found = choose(request)
    assert isinstance(found, Plan)
    return found


def without(request: ChoosePlan, *numbers: int) -> list[Device]:
    return [device for number, (device, _) in enumerate(request.devices) if number not in numbers]


def test_a_lost_fast_device_is_missed_more_than_a_slow_one() -> None:
    request = asked(pp=1)
    plan = chosen(request)
    slow, fast = throughput(request, without(request, 0), plan), throughput(request, without(request, 3), plan)
    assert slow is not None and fast is not None
    # 312, 312, 989 and 2250 TFLOP/s.
    assert abs(slow - (1 - 312 / 3863)) < 1e-6 and abs(fast - (1 - 2250 / 3863)) < 1e-6


def test_what_was_measured_counts_and_not_the_data_sheet() -> None:
    request = asked(pp=1)
    plan = chosen(request)
    seen = (
        StageTime(kind="A100", tp=1, first=0, last=4, seconds=0.08),
        StageTime(kind="B200", tp=1, first=0, last=4, seconds=0.08),
        StageTime(kind="H100", tp=1, first=0, last=4, seconds=0.08),
    )
    known = throughput(replace(request, measured=seen), without(request, 3), plan)
    assert known is not None and abs(known - 0.75) < 0.02, "four devices that turned out to be equally fast"


def test_a_plan_of_fixed_degrees_loses_whole_pipelines() -> None:
    request = asked(("cpu",) * 4, layer_s=0.0, pp=2)
    plan = chosen(request)
    assert (plan.pp, plan.dp) == (2, 2)
    half = throughput(request, without(request, 0), plan)
    assert half is not None and 0.45 < half < 0.6, "three devices make one pipeline of two, not three quarters of the speed"
    assert throughput(request, without(request, 0, 1, 2), plan) is None


def test_on_one_kind_its_own_devices_are_worth_what_runs_on_them() -> None:
    request = asked(("A100",) * 5)
    plan = chosen(request)
    assert throughput(request, plan.devices, plan) == 1.0
    fewer = throughput(request, without(request, 0, 1), plan)
    assert fewer is not None and 0.4 < fewer < 0.8


def test_a_spare_of_a_slower_kind_slows_the_plan_down() -> None:
    request = asked(pp=1)
    plan = chosen(request)
    spares = (a_device(7), a_device(8))
    request = replace(request, devices=(*request.devices, (spares[0], "A100"), (spares[1], "B200")))
    fastest = plan.pipelines[[p.stages[0].devices[0] for p in plan.pipelines].index(a_device(3))]

    def with_spare(spare: Device) -> Plan:
        other = replace(fastest, stages=(replace(fastest.stages[0], devices=(spare,)),))
        return replace(plan, pipelines=tuple(other if one == fastest else one for one in plan.pipelines))

    assert abs(replaced(request, plan, with_spare(spares[1])) - 1.0) < 1e-9
    assert replaced(request, plan, with_spare(spares[0])) < 0.2
