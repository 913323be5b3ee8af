"""Who is found slow, and well again: by what others of its kind take and by its own past, for long enough."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.detection.straggler import MIN_STEPS, PATIENCE_S, Seen, Track, look, patience_s
from orchestrator.domain.balance import Straggler
from orchestrator.domain.ids import Device, Generation, Step
from tests.builders import a_device

A, B, C = a_device(0), a_device(1), a_device(2)
EVEN = {A: 1.0, B: 1.0, C: 1.0}


class Watched:
    """A step a second, each device alike unless work says otherwise."""

    def __init__(self, work: dict[Device, str] | None = None) -> None:
        self.work = work or dict.fromkeys(EVEN, "A100 0-4")
        self.tracks: dict[Device, Track] = {}
        self.known: dict[Device, Straggler] = {}
        self.now = 0
        self.verdicts: list[tuple[int, Device, bool]] = []

    def sees(self, paces: Iterable[dict[Device, float]], generation: int = 1) -> Watched:
        for one in paces:
            self.now += 1
            reports = {d: Seen(seconds=s, step=Step(self.now), at=float(self.now)) for d, s in one.items()}
            self.tracks, changed = look(self.tracks, reports, self.work, Generation(generation), self.known)
            self.known |= changed
            self.verdicts += [(self.now, device, one.is_slow) for device, one in changed.items()]
        return self


def test_a_device_that_takes_twice_as_long_is_found_slow_once_it_has_for_long_enough() -> None:
    seen = Watched().sees([EVEN] * 6)
    seen.sees([EVEN | {B: 2.0}] * 3)
    assert not seen.known, "three steps are no evidence"
    seen.sees([EVEN | {B: 2.0}] * 5)
    assert set(seen.known) == {B} and seen.known[B].is_slow and seen.known[B].factor == 2.0
    (when, _, _) = seen.verdicts[0]
    assert PATIENCE_S + MIN_STEPS <= when <= 6 + PATIENCE_S + MIN_STEPS + 1


def test_what_makes_all_of_a_kind_slow_makes_nobody_a_straggler() -> None:
    assert not Watched().sees([EVEN] * 6).sees([dict.fromkeys(EVEN, 2.0)] * 30).known


def test_a_device_alone_of_its_kind_is_judged_by_its_past() -> None:
    seen = Watched({A: "A100 0-4", B: "H100 0-4", C: "A100 0-4"}).sees([{A: 1.0, B: 0.3, C: 1.0}] * 8)
    assert not seen.known
    assert set(seen.sees([{A: 1.0, B: 0.6, C: 1.0}] * 10).known) == {B}


def test_one_that_was_slow_from_the_start_is_judged_by_its_kind() -> None:
    assert set(Watched().sees([EVEN | {C: 1.7}] * 12).known) == {C}


def test_odd_reports_here_and_there_are_not_believed() -> None:
    seen = Watched().sees([EVEN] * 6)
    seen.sees([EVEN | {B: 5.0}, EVEN, EVEN, EVEN] * 20)
    assert not seen.known


def test_a_device_that_is_as_fast_as_it_was_is_well_again_and_its_past_survives_a_new_generation() -> None:
    seen = Watched().sees([EVEN] * 6).sees([EVEN | {B: 2.0}] * 10)
    seen.work = {A: "A100 0-4", B: "A100 0-3", C: "A100 0-4"}  # it was given fewer layers meanwhile
    seen.sees([EVEN | {B: 1.9}] * 10, generation=2)
    assert seen.known[B].is_slow
    assert not seen.sees([EVEN] * 12, generation=2).known[B].is_slow


def test_a_device_between_both_limits_stays_what_it_is_taken_for() -> None:
    assert not Watched().sees([EVEN] * 6).sees([EVEN | {B: 1.35}] * 60).known
    assert Watched().sees([EVEN] * 6).sees([EVEN | {B: 2.0}] * 10).sees([EVEN | {B: 1.35}] * 60).known[B].is_slow


def test_one_that_comes_and_goes_is_believed_more_and_more_slowly() -> None:
    seen = Watched().sees([EVEN] * 6)
    for _ in range(400):
        seen.sees([EVEN | {B: 2.0}] * 9).sees([EVEN] * 9)
    assert len(seen.verdicts) <= 4, seen.verdicts
    assert patience_s(0) == PATIENCE_S and patience_s(3) == 8 * PATIENCE_S and patience_s(99) == patience_s(98)
