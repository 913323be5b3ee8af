"""Who owns how much of the state on devices of several kinds: never more than fits, mirrors included, then by speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.domain.ids import Device
from orchestrator.domain.kinds import GIB, KINDS
from orchestrator.domain.layout import layout, partners
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import Line, Profile
from orchestrator.domain.spec import JobSpec
from orchestrator.planner.owning import fits_as_it_is, with_shares, words
from tests.builders import a_device, a_spec

LAYERS, LAYER_PARAMS = 8, 64 * (1 << 20)
"""6 GiB of state, 4 GiB of copies and gradients."""
SPEC = a_spec(tp=1, micro_batches=24)


def a_profile() -> Profile:
    lines = tuple(
        Line(name=f"{i}.w", shape=(1 << 13, LAYER_PARAMS >> 13), split=True, layers=(i,), decay=True) for i in range(LAYERS)
    )
    return Profile(num_layers=LAYERS, lines=lines, divisors=(), activation_bytes=1 << 20)


PROFILE = a_profile()


def running(*pipelines: tuple[int, ...], ids: int = 4) -> Plan:
    """Pipelines by their layer cuts, every stage on a node of its own."""
    number, made = 0, []
    for cuts in pipelines:
        stages = []
        for first, last in zip((0, *cuts), (*cuts, LAYERS), strict=True):
            stages.append(Stage(first=first, last=last, devices=(a_device(number),)))
            number += 1
        made.append(Pipeline(stages=tuple(stages), micro_batches=tuple(range(ids * len(made), ids * (len(made) + 1)))))
    return Plan(pipelines=tuple(made))


def on(plan: Plan, *kinds: str) -> dict[Device, str]:
    return dict(zip(plan.devices, kinds, strict=True))


def owned(plan: Plan, spec: JobSpec = SPEC) -> list[float]:
    """Of all state, by device."""
    held = layout(plan, PROFILE, mirrors=spec.recovery.mirrors)
    return [sum(map(len, held.owned[device])) / PROFILE.num_params for device in plan.devices]


def shared(plan: Plan, kinds: Mapping[Device, str], spec: JobSpec = SPEC) -> Plan:
    found = with_shares(plan, spec, PROFILE, kinds)
    assert found is not None
    return found


def test_devices_alike_own_alike_and_their_plan_says_nothing() -> None:
    plan = running((4,), (4,), (4,))
    assert shared(plan, on(plan, *["A100"] * 6)) == plan


def test_the_faster_owns_more() -> None:
    plan = running((), (), (), ())
    found = shared(plan, on(plan, "A100", "A100", "H100", "B200"))
    a100, other, h100, b200 = owned(found)
    assert a100 == other < h100 < b200 and abs(a100 + other + h100 + b200 - 1) < 1e-9
    assert "A100 17%" in words(found, on(plan, "A100", "A100", "H100", "B200"))
    assert fits_as_it_is(found, SPEC, PROFILE, on(plan, "A100", "A100", "H100", "B200"))


def test_speeds_that_hardly_differ_leave_all_alike() -> None:
    plan = running((), ())
    assert with_shares(plan, SPEC, PROFILE, on(plan, "A100", "A100"), {plan.nodes[0]: 0.95}) == plan


def test_memory_comes_first_and_mirrors_count_where_they_are() -> None:
    small = {**KINDS, "small": replace(KINDS["B200"], name="small", memory_bytes=8 * GIB)}
    plan = running((), (), (), ())
    kinds = on(plan, "small", "A100", "A100", "A100")
    found = with_shares(plan, SPEC, PROFILE, kinds, table=small)
    assert found is not None
    sizes = owned(found)
    held = dict(zip(plan.devices, sizes, strict=True))
    for owner, mirror in partners(plan).items():
        held[mirror] += sizes[plan.devices.index(owner)]
    room = (8 * 0.92 - 0.8 - 4.0 - 1 / 128) / 6.0
    assert held[plan.devices[0]] <= room + 1e-4 < 0.5 and min(sizes[1:]) > sizes[0]
    tiny = {**KINDS, "small": replace(KINDS["B200"], name="small", memory_bytes=4 * GIB)}
    assert with_shares(plan, SPEC, PROFILE, kinds, table=tiny) is None, "its copies do not even fit"


def test_without_mirrors_a_small_device_owns_what_fits_and_its_peer_the_rest() -> None:
    spec = replace(SPEC, recovery=replace(SPEC.recovery, mirrors=0))
    table = {**KINDS, "small": replace(KINDS["A100"], name="small", memory_bytes=7 * GIB)}
    plan = running((), ())
    found = with_shares(plan, spec, PROFILE, on(plan, "small", "A100"), table=table)
    assert found is not None
    little, much = owned(found, spec)
    room = (7 * 0.92 - 0.7 - 4.0 - 1 / 1024) / 6.0
    assert 0.98 * room < little <= room * 1.001 and abs(little + much - 1) < 1e-9


def test_stages_of_unequal_pipelines_are_balanced_over_all_their_layers() -> None:
    """A deep pipeline's two stages share with one that holds everything: each owns as long as the others do."""
    plan = running((2,), ())
    kinds = on(plan, "H100", "A100", "H100")
    found = shared(plan, kinds)
    first, second, whole = owned(found)
    assert abs(first + second + whole - 1) < 1e-6
    assert abs(first - 0.25) < 1e-6, "its layers are no more"
    assert 1.9 < whole / second < 2.1, "half and half would have the slow one end last"
