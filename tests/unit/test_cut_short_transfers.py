"""A transfer that is cut short, as properties: what had arrived whole is used, nothing torn is, nobody is sent it again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import elements, every_element, plans, profiles

from orchestrator.domain.generation import Arrived, Held, RankReport
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Interval, Profile, joined
from orchestrator.recovery.restore import RestorePlan, choose_restore
from orchestrator.recovery.settle import settle
from worker.state.relayout import messages

OLD, CUT_SHORT = Generation(1), Generation(2)
STEP = Step(7)


@dataclass
class Memory:
    """What one device has at STEP: the intervals of a layout, or none; and what had arrived of the next."""

    held: Generation | None
    intervals: tuple[Interval, ...]
    arrived: list[Interval] = field(default_factory=list)

    @property
    def all(self) -> set[tuple[str, int]]:
        return set(elements([*self.intervals, *self.arrived]))


@st.composite
def memories(draw: st.DrawFn, profile: Profile, old: Plan, new: Plan) -> dict[Device, Memory]:
    """Some of the old plan's devices died before; a transfer to the new plan was under way when others did."""
    before, after = layout(old, profile, mirrors=1), layout(new, profile, mirrors=1)
    alive = draw(st.sets(st.sampled_from(old.devices), min_size=1))
    memory = {d: Memory(OLD, before.held(d)) if d in alive else Memory(None, ()) for d in {*old.devices, *new.devices}}
    found = transfers({d: before.held(d) for d in alive}, after)
    per_pair: dict[tuple[Device, Device], list[Interval]] = defaultdict(list)
    for move in found.moves:
        per_pair[move.source, move.target].append(move.interval)
    whole = not found.missing and draw(st.booleans())
    for (_, target), intervals in sorted(per_pair.items(), key=str):
        cut = messages(intervals, 64)
        came = len(cut) if whole else draw(st.integers(0, len(cut)))
        memory[target].arrived += [interval for message in cut[:came] for interval in message]
    if whole:  # then some may have seen that everybody has everything, and have let go of what they had before
        for device in draw(st.sets(st.sampled_from(new.devices))):
            memory[device] = Memory(CUT_SHORT, after.held(device))
    for device in draw(st.sets(st.sampled_from(sorted(memory)))):
        del memory[device]
    return memory


def restored(memory: dict[Device, Memory], profile: Profile, plans: tuple[Plan, Plan, Plan]) -> RestorePlan:
    reports = {
        device: RankReport(
            device=device,
            generation=CUT_SHORT,
            voted=STEP,
            answer=None,
            held=Held(generation=one.held, step=STEP) if one.held else None,
            arrived=Arrived(step=STEP, intervals=joined(one.arrived)) if one.arrived else None,
        )
        for device, one in memory.items()
    }
    return choose_restore(
        settlement=settle(CUT_SHORT, STEP, None, reports),
        plans={OLD: plans[0], CUT_SHORT: plans[1]},
        usable=frozenset(memory),
        target=plans[2],
        profile=profile,
        mirrors=1,
        checkpoint=None,
    )


@settings(max_examples=60, deadline=None)
@given(profiles(), plans(), plans(offset=2), plans(), st.data())
def test_whoever_dies_whenever_what_is_whole_in_living_memory_is_used_and_nothing_else(
    profile: Profile, old: Plan, new: Plan, third: Plan, data: st.DataObject
) -> None:
    memory = data.draw(memories(profile, old, new))
    found = restored(memory, profile, (old, new, third))
    living = {element for one in memory.values() for element in one.all}
    assert isinstance(found.restore, FromMemory) == (living == every_element(profile) and bool(memory))
    for move in found.restore.moves if isinstance(found.restore, FromMemory) else ():
        wanted = set(elements([move.interval]))
        assert wanted <= memory[move.source].all
        if move.source != move.target and move.target in memory:
            assert not wanted & memory[move.target].all, "sent again"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 300), st.integers(1, 300))), st.integers(1, 200))
def test_messages_hold_the_same_elements_in_the_same_order_and_are_of_bounded_size(
    lines: list[tuple[str, int, int]], most: int
) -> None:
    intervals = [Interval(line, start, start + length) for line, start, length in lines]
    cut = messages(intervals, most)
    flat = [(i.line, position) for message in cut for i in message for position in range(i.start, i.stop)]
    assert flat == [(i.line, position) for i in intervals for position in range(i.start, i.stop)]
    sizes = [sum(map(len, message)) for message in cut]
    assert all(size == most for size in sizes[:-1]) and all(0 < size <= most for size in sizes)
