"""What the recovery benchmark makes of commits, incidents and peers' lines, and whom its kinds strike."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import pytest

from api.views import IncidentView, JobView, PlanView, SeatView, SizeView, SpareView, StepView
from benchmarks.alarms import FALSE_ALARMS, gauge
from benchmarks.cluster import NODES, NotMeasured
from benchmarks.peer import PeerStep, parsed
from benchmarks.peer_recovery import CONTESTANTS, came_back
from benchmarks.recovery import Measured, kinds_named, summary
from benchmarks.trial import Recovery, figures, incidents_after, is_recovered, recovery, steps_lost, why_not_ready
from benchmarks.victims import KINDS, send_to_all
from benchmarks.workload import recovery_workload
from orchestrator.adapters.processes import ProcessId, identify

PLAIN, NODE = KINDS["rank_kill"], KINDS["power_loss"]


def a_step(number: int, at: float, *, generation: int = 1, seconds: float = 0.2) -> StepView:
    return StepView(
        id=f"{number}-{generation}", step=number, loss=1.0, norm=1.0, tokens=1, seconds=seconds, generation=generation,
        at=datetime.fromtimestamp(at, UTC),
    )  # fmt: skip


def an_incident(number: int, *, at: float = 100.0, pause_s: float | None = 0.1, rolled_back: int = 0) -> IncidentView:
    return IncidentView(
        number=number, cause="rank_lost", message="", at=datetime.fromtimestamp(at, UTC), devices=(), generation=number,
        next_generation=number + 1, decision="", source="", committed=0, rolled_back=rolled_back, moved_elements=0,
        attempts=1, phases={"leave": 0.01 * number}, pause_s=pause_s, rung="fork",
    )  # fmt: skip


def a_job(
    *,
    generation: int = 1,
    status: str = "RUNNING",
    ranks: int = 8,
    incidents: Sequence[IncidentView] = (),
    spares: Sequence[bool] = (),
    at_risk: str = "",
) -> JobView:
    now = datetime.fromtimestamp(0, UTC)
    seats = tuple(SeatView(rank=r, device=f"n/{r}", pipeline=0, stage=0, tp=r, layers=(0, 1)) for r in range(ranks))
    plan = PlanView(generation=generation, tp=2, pp=2, dp=2, summary="", reason="", micro_batches=(), seats=seats)
    return JobView(
        id="j", name="j", status=status, reason="so", generation=generation, step=1, steps=9, loss=None, tokens_per_s=None,
        recoveries=0, plan_summary=None, created_at=now, started_at=now, finished_at=None, labels={}, tokens_per_step=1,
        typical_step_s=0.2, num_params=None, plan=plan, incidents=tuple(incidents), checkpoint=None, failure=None, spec={},
        spares=tuple(SpareView(node=f"s{i}", devices=(), is_ready=ready) for i, ready in enumerate(spares)),
        at_risk=at_risk, size=SizeView(min_devices=0, max_devices=0, target=0),
    )  # fmt: skip


def a_recovery(pause_s: float, *, rung: str = "fork", rolled_back: int = 0) -> Recovery:
    return Recovery(
        step_s=0.2, fault_to_commit_s=pause_s + 0.2, commit_to_commit_s=pause_s + 0.3, supervisor_s=pause_s, incident=1,
        rolled_back=rolled_back, causes=("rank_lost",), rung=rung, phases={"notice": pause_s / 2},
    )  # fmt: skip


# --- the pause ------------------------------------------------------------------------------------------------------------


def test_the_pause_ends_with_the_first_commit_at_full_strength_not_of_the_reduced_generation_before_it() -> None:
    steps = [a_step(1, 99.6), a_step(2, 99.8), a_step(3, 100.7, generation=2), a_step(4, 101.2, generation=3)]
    found = recovery(steps, a_job(), 3, [an_incident(1, at=100.05), an_incident(2, at=100.8)], struck_at=100.0)
    assert found.fault_to_commit_s == pytest.approx(1.2)
    assert found.pause_s == pytest.approx(1.0)
    assert found.commit_to_commit_s == pytest.approx(1.4)
    assert found.phases == pytest.approx({"notice": 0.05, "leave": 0.02})
    assert (found.incident, found.rung, found.supervisor_s) == (2, "fork", pytest.approx(0.2))


def test_a_step_the_old_generation_settles_after_the_failure_is_neither_undisturbed_nor_the_end_of_the_pause() -> None:
    steps = [a_step(1, 99.8), a_step(2, 100.1, seconds=9.0), a_step(3, 100.5, generation=2)]
    found = recovery(steps, a_job(), 2, [an_incident(1)], struck_at=100.0)
    assert (found.step_s, found.fault_to_commit_s) == (0.2, pytest.approx(0.5))


def test_a_generation_without_a_commit_has_no_pause() -> None:
    with pytest.raises(NotMeasured, match="of 2 after it"):
        recovery([a_step(1, 99.8)], a_job(), 2, [an_incident(1)], struck_at=100.0)


@pytest.mark.parametrize(
    ("view", "recovered"),
    [
        (a_job(generation=2, incidents=[an_incident(1)]), True),
        (a_job(generation=1, incidents=[]), False),
        (a_job(generation=2, incidents=[an_incident(1, pause_s=None)]), False),
        (a_job(generation=2, incidents=[an_incident(1)], ranks=6), False),
        (a_job(generation=2, incidents=[an_incident(1)], status="RECOVERING"), False),
    ],
)
def test_recovered_is_full_strength_and_a_closed_ledger(view: JobView, recovered: bool) -> None:
    assert is_recovered(view, a_job()) is recovered


def test_incidents_are_told_apart_by_number_because_a_view_holds_the_newest_only() -> None:
    view = a_job(incidents=[an_incident(number) for number in range(51, 151)])
    assert [incident.number for incident in incidents_after(view, 148)] == [149, 150]


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (a_job(spares=[True]), ""),
        (a_job(spares=[False]), "0 of 1 spares"),
        (a_job(), "0 of 1 spares"),
        (a_job(spares=[True], ranks=6), "6 of 8 ranks"),
        (a_job(spares=[True], at_risk="a node holds both"), "at risk"),
        (a_job(spares=[True], status="RESIZING"), "RESIZING"),
    ],
)
def test_a_node_is_struck_only_while_a_spare_is_ready_and_nothing_else_is_amiss(view: JobView, why: str) -> None:
    found = why_not_ready(view, NODE)
    assert (why in found) if why else found == ""


def test_a_rank_is_struck_without_any_spare() -> None:
    assert why_not_ready(a_job(), PLAIN) == ""


# --- the ledger -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [
        ([1, 2, 3, 4], 0),
        ([7, 8, 9], 0),  # the first that is still kept need not be step 1
        ([1, 2, 3, 4, 3, 4, 5], 2),
        ([1, 2, 4, 5], 1),
        ([1, 2, 3, 2, 3, 3, 4], 3),
        ([], 0),
    ],
)
def test_steps_lost_are_those_run_again_and_those_missing(numbers: list[int], lost: int) -> None:
    assert steps_lost([a_step(number, float(place)) for place, number in enumerate(numbers)]) == lost


def test_the_summary_has_every_key_and_says_what_was_not_measured() -> None:
    part = Measured(
        recoveries=(a_recovery(0.1, rolled_back=1), a_recovery(0.3)), uncaused=(an_incident(1),), suspected=2, steps_lost=1,
        missed="node n is not up",
    )  # fmt: skip
    found = summary({"rank_stop": part})
    assert set(KINDS) <= set(found)
    assert found["rank_kill"] is None
    assert found["rank_stop_missed"] == "node n is not up"
    assert (found["steps_lost"], found["steps_rolled_back"], found["false_alarms"]) == (1, 1, 3)


def test_where_nothing_was_measured_nothing_is_claimed_to_be_zero() -> None:
    nothing = Measured(recoveries=(), uncaused=(), suspected=0, steps_lost=0, missed="the API does not answer")
    found = summary({"rank_kill": nothing})
    assert found["rank_kill"] is None
    assert [found[key] for key in ("steps_lost", "steps_rolled_back", "false_alarms")] == [None, None, None]


def test_figures_of_a_kind() -> None:
    found = figures([a_recovery(0.1), a_recovery(0.2), a_recovery(0.4, rung="spare")])
    assert (found["median_s"], found["p95_s"], found["max_s"]) == (0.2, 0.38, 0.4)
    assert found["phases"] == {"notice": 0.1}
    assert found["rungs"] == {"fork": 2, "spare": 1}
    assert found["causes"] == {"rank_lost": 3}


def test_false_alarms_are_read_as_prometheus_reads_them() -> None:
    text = f'# TYPE {FALSE_ALARMS} gauge\n{FALSE_ALARMS}{{job="a"}} 2.0\n{FALSE_ALARMS}{{job="b"}} 5.0\n'
    assert gauge(text, FALSE_ALARMS, "b") == 5
    assert gauge(text, FALSE_ALARMS, "c") is None


# --- whom it strikes ------------------------------------------------------------------------------------------------------


def test_kinds_are_asked_for_by_name() -> None:
    assert [kind.name for kind in kinds_named("power_loss, rank_kill,power_loss")] == ["power_loss", "rank_kill"]
    with pytest.raises(argparse.ArgumentTypeError, match="no kind gremlins"):
        kinds_named("rank_kill,gremlins")


def test_where_whole_nodes_are_struck_one_more_stands_by_and_the_job_asks_for_it() -> None:
    assert len(NODE.nodes) == len(NODES) + 1
    assert len(PLAIN.nodes) == len(NODES)
    assert recovery_workload(NODE.spares).spec().recovery.spares == 1
    assert recovery_workload(PLAIN.spares).spec().recovery.spares == 0


@pytest.fixture
def sleepers() -> Iterator[list[ProcessId]]:
    started = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        yield [found for one in started if (found := identify(one.pid))]
    finally:
        for one in started:
            one.kill()
            one.wait(10)


def test_who_is_forked_while_a_node_is_struck_is_struck_too(sleepers: list[ProcessId]) -> None:
    seen = iter([sleepers[:1], sleepers, sleepers])
    _, struck = send_to_all(lambda: next(seen), signal.SIGSTOP, 0.0)
    assert list(struck) == sleepers
    for process in sleepers:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


# --- peers ----------------------------------------------------------------------------------------------------------------


def a_line(at: float, step: int, pid: int, members: int = 0) -> PeerStep:
    return PeerStep(at=at, step=step, norm=1.0, rank=pid % 10, pid=pid, cpu_s=0.0, members=members)


OLD = frozenset({10, 11, 12, 13})


def test_what_a_restarted_peer_repeats_from_its_checkpoint_is_no_new_step() -> None:
    before = [a_line(99.9, 7, 10), a_line(100.1, 8, 11)]  # step 8 was under way, its checkpoint not yet written
    again = [a_line(104.0, 8, 20), a_line(104.5, 9, 21)]
    assert came_back([*before, *again], OLD, 4, 100.0) == (104.5, 104.5)
    assert came_back([*before, *again[:1]], OLD, 4, 100.0) is None


def test_survivors_resume_with_fewer_and_full_strength_is_the_lost_replicas_first_step_with_everybody() -> None:
    under_way = a_line(100.1, 8, 10, members=4)
    fewer = [a_line(101.2, 9, 10, members=3), a_line(101.4, 10, 11, members=3)]
    healing, whole = a_line(106.0, 30, 23, members=3), a_line(106.2, 31, 23, members=4)
    assert came_back([under_way, *fewer, healing], OLD, 4, 100.0) is None
    assert came_back([under_way, *fewer, healing, whole], OLD, 4, 100.0) == (101.2, 106.2)


def test_a_line_of_a_log_is_read_as_it_was_written() -> None:
    assert parsed("12.5 3 0.25 1 77 1.5 4\n") == PeerStep(at=12.5, step=3, norm=0.25, rank=1, pid=77, cpu_s=1.5, members=4)


def test_peers_have_the_keys_that_were_promised() -> None:
    keys = [key for one in CONTESTANTS for key in one.figures]
    assert keys == ["torchrun_s", "torchft_resume_s", "torchft_full_s", "raytrain_s"]
