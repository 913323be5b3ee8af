"""What a host takes for a hang, and what it does not: slow first steps, saves, sleeping and starving machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest

from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.sight import Phase
from worker.page.reader import Glance
from worker.watch import FLOORS, LOOK_S, Kind, Opinion, Process, Watch

ME = Device(NodeId("n0"), 0)
AT_REST = Process(is_stopped=False, is_in_disk=False, cpu_s=0.0, starved_s=0.0)


@dataclass
class Scene:
    """One rank in generation 3, looked at every tenth of a second; its clock is the page's."""

    tells_waits: bool = True
    waits_inside: bool = False
    now: float = 100.0
    glance: Glance = field(
        default_factory=lambda: Glance(
            generation=Generation(3),
            phase=Phase.COMPUTE,
            step=Step(7),
            collective=40,
            in_wait=False,
            progressed_at=100.0,
            waiting_since=99.0,
            told_at=0.0,
            quiet_since=0.0,
            is_behind=False,
            has_passed=True,
        )
    )
    process: Process = AT_REST
    told: list[tuple[float, str]] = field(default_factory=list)
    """How long after the beginning, and what."""

    def __post_init__(self) -> None:
        self.watch = Watch(Generation(3), self.now, tells_waits=self.tells_waits, waits_inside=self.waits_inside)
        self.began = self.now

    def see(self, seconds: float, live: Callable[[float], None] = lambda _: None, every_s: float = LOOK_S) -> Scene:
        """live(dt): what becomes of the rank between two looks."""
        for _ in range(round(seconds / every_s)):
            self.now += every_s
            live(every_s)
            if self.watch.look(self.now, {ME: self.glance}, lambda _: self.process):
                self.told.append((self.now - self.began, self.opinion.why))
        return self

    @property
    def opinion(self) -> Opinion:
        return self.watch.opinion(ME)

    # --- what a rank may do -----------------------------------------------------------------------------------------------

    def move(self, **changes: object) -> Scene:
        self.glance = replace(self.glance, progressed_at=self.now, **changes)  # type: ignore[arg-type]
        return self

    def begin_wait(self) -> Scene:
        self.glance = replace(
            self.glance,
            in_wait=True,
            collective=self.glance.collective + 1,
            waiting_since=self.now,
            told_at=0.0,
            quiet_since=0.0,
        )
        return self

    def wait(self, _: float) -> None:
        """Nothing moves, and the wait says so."""
        self.glance = replace(self.glance, told_at=self.now, quiet_since=self.glance.waiting_since)

    def burn(self, dt: float) -> None:
        self.process = replace(self.process, cpu_s=self.process.cpu_s + dt)

    def starve(self, dt: float) -> None:
        self.process = replace(self.process, starved_s=self.process.starved_s + dt)

    def steps(self, seconds: float, number: int = 20) -> Scene:
        """Steps of that many seconds, asleep all the while."""
        for _ in range(number):
            self.see(seconds).move(step=Step(self.glance.step + 1))
        return self


def test_a_rank_that_moves_is_never_told() -> None:
    scene = Scene().steps(0.3)
    assert not scene.told and not scene.opinion.why and not scene.opinion.is_guilty


def test_a_stopped_process_is_guilty_within_half_a_second_even_while_it_waits() -> None:
    for scene in (Scene(), Scene().begin_wait()):
        scene.process = replace(AT_REST, is_stopped=True)
        scene.see(0.7)
        ((after_s, why),) = scene.told
        assert after_s <= 0.6 and "stopped (SIGSTOP) for 0." in why and scene.opinion.is_guilty


def test_a_process_stopped_for_a_moment_is_not() -> None:
    scene = Scene()
    scene.process = replace(AT_REST, is_stopped=True)
    scene.see(0.3)
    scene.process = AT_REST
    scene.see(0.2).move()
    assert not scene.told


def test_sleeping_outside_a_wait_is_guilt_beyond_the_floor_and_told_again_after_twice_the_time() -> None:
    scene = Scene().see(8.0)
    floor = FLOORS[Kind.STEP].asleep_s
    first, second, third = (after_s for after_s, _ in scene.told)
    assert floor <= first <= floor + 0.4 and second == pytest.approx(2 * first, abs=0.25)
    assert third == pytest.approx(2 * second, abs=0.25)
    assert scene.opinion.is_guilty and "slept outside any wait" in scene.opinion.why


def test_a_generation_of_long_steps_teaches_a_long_limit() -> None:
    scene = Scene().steps(1.0, 5).see(3.0)
    assert not scene.told and scene.watch.limits(Kind.STEP).asleep_s == pytest.approx(5.0, abs=1.0)
    scene.see(3.0)
    assert scene.told, "and a longer one is a hang again"


def test_a_stall_that_ended_by_itself_is_learned_and_the_same_again_is_no_alarm() -> None:
    scene = Scene().see(3.0).move()
    assert len(scene.told) == 1
    scene.see(3.0).move()
    assert len(scene.told) == 1


def test_what_was_learned_goes_with_the_generation() -> None:
    scene = Scene().steps(1.0, 5)
    scene.watch = Watch(Generation(4), scene.now, tells_waits=True)
    assert scene.watch.limits(Kind.STEP) == FLOORS[Kind.STEP]


@pytest.mark.parametrize(
    ("phase", "has_passed", "seconds"),
    [
        (Phase.COMPUTE, False, 7.0),
        (Phase.SAVE, True, 15.0),
        (Phase.RESTORE, False, 9.0),
        (Phase.FORM, False, 4.0),
        (Phase.EVALUATE, True, 7.0),
    ],
)
def test_a_slow_first_step_save_or_restore_is_no_hang_and_a_very_slow_one_is(
    phase: Phase, has_passed: bool, seconds: float
) -> None:
    scene = Scene().move(phase=phase, has_passed=has_passed).see(seconds)
    assert not scene.told
    scene.see(2 * seconds)
    assert scene.told and scene.opinion.is_guilty


def test_a_job_may_set_a_floor_of_its_own_which_stopped_processes_have_no_part_in() -> None:
    scene = Scene()
    scene.watch = Watch(Generation(3), scene.now, tells_waits=True, hang_s=30.0)
    limits = scene.watch.limits(Kind.STEP)
    assert (limits.wait_s, limits.asleep_s, limits.burning_s) == (FLOORS[Kind.STEP].wait_s, 30.0, 30.0)
    assert scene.watch.limits(Kind.FIRST).burning_s == FLOORS[Kind.FIRST].burning_s, "it shortens nothing"
    scene.see(29.0)
    assert not scene.told
    scene.see(2.0)
    assert len(scene.told) == 1 and scene.opinion.is_guilty
    scene.move()
    scene.process = replace(AT_REST, is_stopped=True)
    scene.see(0.7)
    assert len(scene.told) == 2


def test_an_evaluation_that_computes_for_long_is_no_hang_and_an_endless_loop_is() -> None:
    scene = Scene().steps(0.2).move(phase=Phase.EVALUATE)
    scene.see(100.0, scene.burn)
    assert not scene.told
    scene.see(25.0, scene.burn)
    assert scene.opinion.is_guilty and "of CPU without progress" in scene.opinion.why


def test_a_step_that_computes_for_long_is_no_hang_and_an_endless_loop_is() -> None:
    scene = Scene()
    scene.steps(0.2)
    scene.see(7.0, scene.burn)
    assert not scene.told
    scene.see(5.0, scene.burn)
    assert scene.opinion.is_guilty and "of CPU without progress" in scene.opinion.why


@pytest.mark.parametrize(("kind", "phase"), [(Kind.EVALUATION, Phase.EVALUATE), (Kind.SAVE, Phase.SAVE)])
def test_each_kind_of_phase_learns_a_limit_of_its_own(kind: Kind, phase: Phase) -> None:
    scene = Scene()
    for _ in range(2):
        scene.steps(0.2).move(phase=phase).see(5.0).move(phase=Phase.COMPUTE)
    assert not scene.told
    assert scene.watch.limits(kind).asleep_s == pytest.approx(25.0, abs=2.0)
    assert scene.watch.limits(Kind.STEP).asleep_s == FLOORS[Kind.STEP].asleep_s, "a step is no longer for that"


def test_a_rank_that_is_still_in_the_generation_before_teaches_nothing() -> None:
    scene = Scene()
    scene.watch = Watch(Generation(4), scene.now, tells_waits=True)
    scene.see(4.0).move(generation=Generation(4)).see(LOOK_S)
    assert not scene.told and scene.watch.limits(Kind.FORM) == FLOORS[Kind.FORM]


def test_who_is_given_no_cpu_is_never_guilty() -> None:
    scene = Scene()
    scene.see(60.0, scene.starve)
    assert not scene.told and scene.opinion.still_s > 50


def test_who_sleeps_behind_its_own_device_works_until_that_hangs() -> None:
    """A micro-batch of seconds, in a generation that has taught nothing yet."""
    scene = Scene().move(is_behind=True).see(FLOORS[Kind.STEP].burning_s - 0.5)
    assert not scene.told
    assert scene.see(1.0).told and scene.opinion.is_guilty
    awake = Scene().move(is_behind=True).see(1.0)
    awake.glance = replace(awake.glance, is_behind=False)
    awake.see(FLOORS[Kind.STEP].asleep_s + 0.5)
    assert awake.told and "slept outside any wait" in awake.told[0][1], "it does not sleep for its device any more"


@pytest.mark.parametrize("is_behind", [False, True])
def test_where_devices_wait_for_each_other_none_is_guilty_of_being_slow(is_behind: bool) -> None:
    scene = Scene(tells_waits=False, waits_inside=True).move(is_behind=is_behind)
    scene.see(FLOORS[Kind.STEP].burning_s + 0.5, scene.burn)
    assert scene.told and scene.opinion.in_wait and not scene.opinion.is_guilty
    asleep = Scene(tells_waits=False, waits_inside=True).see(FLOORS[Kind.STEP].asleep_s + 0.5)
    assert asleep.told and asleep.opinion.is_guilty, "no device is to blame for that"


def test_who_shares_a_cpu_is_judged_by_what_it_used() -> None:
    """An eighth of a core for a minute is 7.5 s of work."""
    scene = Scene()
    scene.see(60.0, lambda dt: (scene.burn(dt / 8), scene.starve(dt * 7 / 8))[0])
    assert not scene.told


def test_a_wait_in_which_nothing_moves_is_told_and_is_nobodys_guilt() -> None:
    scene = Scene().begin_wait()
    scene.see(1.5, scene.wait)
    ((after_s, why),) = scene.told
    assert 1.0 <= after_s <= 1.2 and "has waited" in why and not scene.opinion.is_guilty and scene.opinion.in_wait


def test_a_long_transfer_in_which_messages_move_is_none() -> None:
    scene = Scene().begin_wait()

    def moving(_: float) -> None:
        scene.glance = replace(scene.glance, told_at=scene.now, quiet_since=scene.now - 0.05)

    scene.see(30.0, moving)
    assert not scene.told


def test_a_wait_that_no_longer_says_whom_it_is_for_is_judged_like_work() -> None:
    """The lock of its interpreter is held by another thread, say: it does not even look at its connections."""
    scene = Scene().begin_wait()
    scene.see(0.5, scene.wait).see(3.0)
    assert scene.opinion.is_guilty


def test_where_waits_tell_nothing_a_wait_is_one() -> None:
    scene = Scene(tells_waits=False).begin_wait().see(5.0)
    assert scene.told and not scene.opinion.is_guilty and scene.opinion.in_wait


@pytest.mark.parametrize("dropped", ["enter", "leave", "phase"])
def test_a_word_that_was_never_said_does_not_switch_the_watch_off(dropped: str) -> None:
    """There are no pairs that could come apart: every look judges what the page says then."""
    scene = Scene().steps(0.2, 3)
    if dropped == "leave":
        scene.begin_wait()  # and it works on, as if it waited
    elif dropped == "phase":
        scene.move(phase=Phase.UPDATE)
    scene.see(4.0)
    assert scene.opinion.is_guilty


def test_a_watch_that_slept_itself_counts_nothing_of_that_time() -> None:
    scene = Scene().see(1.0)
    scene.now += 30.0
    scene.see(1.2)
    assert not scene.told


def test_a_finished_rank_may_be_idle_and_one_that_does_not_begin_may_not() -> None:
    scene = Scene().move(phase=Phase.IDLE).see(60.0)
    assert not scene.told
    late = Scene().move(phase=Phase.IDLE, generation=Generation(2)).see(6.0)
    assert late.opinion.is_guilty and "form limit" in late.opinion.why


def test_each_rank_has_its_own_clock_and_all_learn_together() -> None:
    other = Device(NodeId("n0"), 1)
    scene = Scene()
    told: list[Iterable[Device]] = []
    for turn in range(40):
        scene.now += LOOK_S
        moving = replace(scene.glance, step=Step(turn))
        told.append(scene.watch.look(scene.now, {ME: scene.glance, other: moving}, lambda _: AT_REST))
    assert {device for devices in told for device in devices} == {ME}
    assert not scene.watch.opinion(other).why
