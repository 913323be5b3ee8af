"""Of what all own only what is next to a lost replica changes its owner, and nobody comes to own much more than others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import BLOCK, Line, Profile
from orchestrator.planner.choose import choose
from orchestrator.planner.heirs import WORTH, in_place
from tests.builders import a_spec


def a_plan(replicas: list[int], shares: list[int] | None = None) -> Plan:
    """Each on a node of its own, of one stage."""
    return Plan(
        pipelines=tuple(
            Pipeline(
                stages=(
                    Stage(
                        first=0,
                        last=1,
                        devices=(Device(NodeId(f"n{number:03}"), 0),),
                        shares=(shares[number],) if shares else (),
                    ),
                ),
                micro_batches=(place,),
            )
            for place, number in enumerate(replicas)
        )
    )


def a_profile(elements: int) -> Profile:
    line = Line(name="w", shape=(elements,), split=False, layers=(0,), decay=True)
    return Profile(num_layers=1, lines=(line,), divisors=(), activation_bytes=1)


def owned(plan: Plan, profile: Profile) -> dict[Device, int]:
    return {device: sum(map(len, mine)) for device, mine in layout(plan, profile, mirrors=1).owned.items()}


def moved(before: Plan, after: Plan, profile: Profile) -> Counter[Device]:
    """Elements that each device is sent."""
    held = layout(before, profile, mirrors=1)
    sources = {device: held.held(device) for device in before.devices if device in after.devices}
    found = transfers(sources, layout(after, profile, mirrors=1))
    assert not found.missing
    return sum((Counter({m.target: len(m.interval)}) for m in found.moves if m.source != m.target), Counter())


@pytest.mark.parametrize("count", [5, 8, 16, 64])
def test_one_that_is_lost_moves_three_times_its_share_at_most_however_many_there_are(count: int) -> None:
    profile = a_profile(BLOCK * 20 * count * (count - 1))
    before, share = a_plan(list(range(count))), BLOCK * 20 * (count - 1)
    for lost in {0, 1, count // 2, count - 1}:
        anew = a_plan([number for number in range(count) if number != lost])
        after = in_place(anew, before)
        sent, were = moved(before, after, profile), moved(before, anew, profile)
        assert sum(sent.values()) < min(sum(were.values()), 3.1 * 2 * share)
        assert max(sent.values()) <= share, "what anybody waits for is no more than who mirrors another one now must get"
        assert max(owned(after, profile).values()) <= (1 + WORTH) * profile.num_params / (count - 1) + BLOCK
        far = [d for d in after.devices if abs(int(d.node[1:]) - lost) > 11 and d.node != f"n{(lost - 1) % count:03}"]
        old, new = layout(before, profile, mirrors=1), layout(after, profile, mirrors=1)
        assert all(old.owned[device] == new.owned[device] for device in far)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 14))
def test_what_all_own_together_stays_all_there_is_and_nobody_owns_too_much(data: st.DataObject, count: int) -> None:
    lost = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
    shares = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=count, max_size=count))
    before = a_plan(list(range(count)), [10 * one for one in shares] if shares else None)
    left = [number for number in range(count) if number not in lost]
    anew = a_plan(left, [10 * one for one in shares] if shares else None)
    after = in_place(anew, before, anew)
    assert [one.micro_batches for one in after.pipelines] == [one.micro_batches for one in anew.pipelines]
    if after is anew:
        return
    was = [one.stages[0].shares[0] if shares else 10_000 for one in before.pipelines]
    now = dict(zip(left, (one.stages[0].shares[0] for one in after.pipelines), strict=True))
    assert sum(now.values()) == sum(was) and all(now[number] >= was[number] for number in left)
    most = (1 + WORTH) * sum(was) / sum(was[number] for number in left)
    assert all(now[number] <= most * was[number] for number in left)


def test_what_is_not_left_of_the_plan_that_ran_stays_as_it_is() -> None:
    before = a_plan(list(range(8)))
    fewer = a_plan([0, 1, 2, 3, 4, 5, 6])
    other = replace(fewer.pipelines[3], stages=(Stage(first=0, last=1, devices=(Device(NodeId("new"), 0),)),))
    for plan in (
        before,
        replace(fewer, pipelines=(*fewer.pipelines[:3], other, *fewer.pipelines[4:])),
        replace(fewer, pipelines=fewer.pipelines[::-1]),
        a_plan([0]),
    ):
        assert in_place(plan, before) is plan
    assert in_place(fewer, before) is not fewer


def test_one_loss_after_another_makes_nobody_own_ever_more() -> None:
    profile, left = a_profile(BLOCK * 20 * 720), list(range(16))
    plan = a_plan(left)
    for lost in (7, 8, 6, 9, 5, 10):
        left.remove(lost)
        # What goes on has the shares that it had.
        shares = {p.stages[0].devices[0]: p.stages[0].shares for p in plan.pipelines}
        anew = a_plan(left)
        kept = tuple(
            replace(p, stages=(replace(p.stages[0], shares=shares[p.stages[0].devices[0]]),)) for p in anew.pipelines
        )
        inherited = in_place(replace(anew, pipelines=kept), plan)
        plan = anew if inherited.pipelines == kept else inherited
        assert max(owned(plan, profile).values()) <= (1 + WORTH) * profile.num_params / len(left) + BLOCK


def test_a_job_on_devices_alike_goes_on_with_what_each_owned() -> None:
    spec = a_spec(tp=1, pp=1, micro_batches=16)
    devices = tuple((Device(NodeId(f"n{number:03}"), 0), "A100") for number in range(8))
    asked = ChoosePlan(job=JobId("j"), generation=Generation(1), spec=spec, profile=a_profile(BLOCK * 560), devices=devices)
    before = choose(asked)
    assert isinstance(before, Plan) and before.dp == 8
    loss = replace(asked, devices=devices[:3] + devices[4:], lost=devices)
    anew, after = choose(loss), choose(replace(loss, running=before))
    assert isinstance(anew, Plan) and isinstance(after, Plan)
    assert ([one.micro_batches for one in after.pipelines], after.devices) == (
        [one.micro_batches for one in anew.pipelines],
        anew.devices,
    )
    assert moved(before, after, asked.profile).total() < moved(before, anew, asked.profile).total()
