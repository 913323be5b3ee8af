"""When trying again is given up: the three rules, what is never charged, and what a restarted supervisor still knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.detection.classify import exit_fault
from orchestrator.domain import codec
from orchestrator.domain.events import DeadlinePassed
from orchestrator.domain.failure import Cause, Failure, Fault
from orchestrator.domain.host_events import HostFailed, RankExited
from orchestrator.domain.ids import Generation, NodeId, Rank, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.state import Failed, Reforming, Running, Stopping
from orchestrator.recovery.breaker import MAX_REST_S, REST_S, TRIES, rest_s
from orchestrator.supervisor.deadlines import deadlines
from orchestrator.supervisor.kernel import State
from tests.builders import JOB, Bench, a_device, a_report, a_spec

N0 = NodeId("n0")


def trained(steps: int = 3, **settings: int) -> Bench:
    return Bench(spec=a_spec(**{"tp": 2, "pp": 2, "dp": 2, **settings})).running().passed(*range(1, steps + 1))


def raises(bench: Bench, message: str = "ValueError: odd", rank: int = 3) -> Bench:
    state, device = bench.state, bench.device(rank)
    generation = state.closing.generation if isinstance(state, Reforming) else bench.record.generation
    report = a_report(device, generation=generation, held=None)
    return bench.exited(device, user_error=True, exit_code=1, message=message, report=report)


def hangs(bench: Bench) -> Bench:
    """The next generation is formed and does not become ready."""
    bench.prepared()
    if isinstance(bench.state, Reforming) and bench.state.closing.settlement is None:
        step, generation = bench.record.committed, bench.state.closing.generation
        bench.all_report(lambda d: a_report(d, generation=generation, voted=step, held=step))
    return bench.tell(DeadlinePassed(job=JOB, key=f"form:{bench.record.generation}"))


def verdict(bench: Bench) -> Failed:
    state = bench.state
    outcome = state.outcome if isinstance(state, Stopping) else state
    assert isinstance(outcome, Failed), outcome
    return outcome


# --- the same error twice ------------------------------------------------------------------------------------------------


def test_an_error_of_the_program_is_tried_once_more() -> None:
    bench = raises(trained()).recovered().passed(4)
    assert isinstance(bench.state, Running) and bench.record.committed == 4 and not bench.record.failures


def test_the_same_error_at_the_same_step_ends_the_job_and_names_step_error_and_ranks() -> None:
    bench = raises(raises(trained()).recovered(), rank=5)
    failed = verdict(bench)
    assert failed.verdict == "repeated_error" and failed.exit_code == 1 and failed.device == a_device(1, 1)
    assert "step 4 failed twice in the same way (rank 3 on n2/1, rank 5 on n1/1)" in failed.message
    assert "ValueError: odd" in failed.message


@pytest.mark.parametrize("again", ["KeyError: other", "ValueError: even"])
def test_another_error_at_the_same_step_is_another_matter(again: str) -> None:
    bench = raises(raises(trained()).recovered(), again).recovered()
    assert isinstance(bench.state, Running)


def test_the_same_error_at_another_step_is_another_matter() -> None:
    bench = trained()
    for step in range(4, 12):
        raises(bench).recovered().passed(step)
    assert isinstance(bench.state, Running) and bench.record.committed == 11


def test_numbers_and_addresses_do_not_make_it_another_error() -> None:
    bench = raises(trained(), "RuntimeError: 0x7f3a at 12 of 100").recovered()
    assert verdict(raises(bench, "RuntimeError: 0x80ff at 7 of 99")).verdict == "repeated_error"


def test_steps_made_up_after_a_rollback_do_not_forgive_the_error() -> None:
    bench = trained(7).saved(5).checkpoint(5)
    for device in bench.plan.devices:  # all of them at step 8, as a loss that is no number does
        if device in bench.record.pids:
            bench.exited(device, user_error=True, exit_code=1, message="loss is nan", report=a_report(device, held=None))
    bench.prepared().ready()
    assert bench.record.committed == 5 and isinstance(bench.state, Running)
    bench.passed(6, 7)
    assert bench.record.failures_in_a_row == 0 and len(bench.record.failures) == 1
    failed = verdict(raises(bench, "loss is nan"))
    assert failed.verdict == "repeated_error" and "step 8" in failed.message


def test_an_error_that_survivors_felt_first_counts_as_the_error_it_was() -> None:
    bench = trained()
    for _ in range(2):
        assert isinstance(bench.state, Running)
        generation = bench.record.generation
        bench.reports(a_report(bench.device(0), generation=generation, voted=3, held=3, lost_peer=3))
        raises(bench)
        bench.recovered()
    assert verdict(bench).verdict == "repeated_error"


def test_an_error_of_the_machinery_and_a_crash_count_like_the_programs_own() -> None:
    for code, log in ((70, ("Traceback", "OSError: no descriptors left 88")), (-11, ())):
        bench = trained()
        for _ in range(2):
            assert isinstance(bench.state, Running)
            bench.exited(bench.device(1), exit_code=code, log_tail=log).recovered()
        assert verdict(bench).verdict == "repeated_error"


# --- no progress ---------------------------------------------------------------------------------------------------------


def test_three_generations_that_are_formed_and_commit_nothing_end_the_job() -> None:
    bench = trained().exited(trained().device(0))
    for _ in range(3):
        assert isinstance(bench.state, Reforming)
        hangs(bench)
    failed = verdict(bench)
    assert failed.verdict == "no_progress" and "3 generations (2 to 4) ended at step 4" in failed.message


def test_a_committed_step_between_them_is_progress() -> None:
    bench = trained().exited(trained().device(0))
    for step in (4, 5, 6, 7):
        hangs(bench).recovered().passed(step).exited(bench.device(0))
    assert isinstance(bench.state, Reforming)


# --- budgets -------------------------------------------------------------------------------------------------------------


def test_what_is_done_to_a_job_has_a_larger_budget_of_its_own() -> None:
    bench = trained(max_attempts=1, max_external_attempts=20)
    for _ in range(20):
        bench.exited(bench.device(0)).recovered()
        assert isinstance(bench.state, Running)
    failed = verdict(bench.exited(bench.device(0)))
    assert failed.verdict == "out_of_attempts" and "21 generations in a row" in failed.message


def test_progress_resets_the_budgets() -> None:
    bench = trained(max_external_attempts=2)
    for step in range(4, 10):
        bench.exited(bench.device(0)).recovered().exited(bench.device(1)).recovered()
        assert bench.record.failures_in_a_row == 2
        bench.passed(step)
        assert bench.record.failures_in_a_row == 0


def test_each_cause_has_its_own_budget() -> None:
    bench = trained(max_external_attempts=2)
    for _ in range(2):
        bench.exited(bench.device(0)).recovered().said(N0, HostFailed(message="zygote", exit_code=-9)).planned()
        bench.host_closed(N0).recovered()
    assert isinstance(bench.state, Running) and bench.record.failures_in_a_row == 4


def test_the_budget_also_ends_a_job_whose_last_host_is_gone() -> None:
    bench = Bench(nodes=1, spec=a_spec(dp=2, max_external_attempts=0)).running().host_gone(N0)
    assert isinstance(bench.state, Failed)


def test_seats_whose_process_dies_before_they_are_formed_are_not_forked_for_ever() -> None:
    bench = trained(max_attempts=2).exited(trained().device(0))
    for attempt in range(10):
        if not isinstance(bench.state, Reforming):
            break
        bench.prepared(N0)
        device = bench.device(0)
        report = a_report(device, generation=bench.record.generation, held=None)
        bench.exited(device, exit_code=70, message="", log_tail=(f"{'abcdefghij'[attempt]} failed",), report=report)
    failed = verdict(bench)
    assert failed.verdict == "out_of_attempts" and "3 generations in a row" in failed.message


def test_control_plane_trouble_is_never_charged() -> None:
    bench = trained(max_attempts=0, max_external_attempts=0)
    for node in bench.nodes:
        bench.host_silent(node)
    bench.tell(DeadlinePassed(job=JOB, key="isolated:1"))
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.CONTACT_LOST
    assert not bench.record.failures


def test_a_generation_that_cannot_be_reached_while_it_forms_is_not_charged() -> None:
    bench = trained().exited(trained().device(0)).prepared()
    bench.all_report(lambda d: a_report(d, voted=3, held=3))
    charged = bench.record.failures
    bench.host_silent(N0).tell(DeadlinePassed(job=JOB, key="form:2"))
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.CONTACT_LOST
    assert bench.record.failures == charged


# --- the record ----------------------------------------------------------------------------------------------------------


def test_a_supervisor_that_restarts_has_forgotten_nothing() -> None:
    bench = raises(trained()).recovered()
    stored = codec.loads(JobRecord, codec.dumps(bench.record))
    assert stored.failures == bench.record.failures and len(stored.failures) == 1
    bench.kernel = State(jobs={JOB: stored}, nodes=bench.kernel.nodes, root="/shared")
    assert verdict(raises(bench)).verdict == "repeated_error"


def _exited(**changes: object) -> RankExited:
    given = {"device": a_device(0), "pid": 1, "exit_code": -9, "report": a_report(a_device(0), held=None), **changes}
    return RankExited(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("exited", "signature", "is_external"),
    [
        (lambda: _exited(), "", True),
        (lambda: _exited(exit_code=-15), "", True),
        (lambda: _exited(exit_code=-11), "was killed by SIGSEGV", False),
        (lambda: _exited(exit_code=-6), "was killed by SIGABRT", False),
        (lambda: _exited(exit_code=1, user_error=True, message="E: at 3"), "E: at #", False),
        (lambda: _exited(exit_code=1, user_error=True, message="InjectedError: raised on purpose"), "", True),
        (lambda: _exited(exit_code=0, user_error=True, message="exited by itself"), "exited by itself", False),
        (lambda: _exited(exit_code=70, log_tail=("OSError: 12", "")), "exit code # OSError: #", False),
    ],
)
def test_what_a_process_does_to_itself_is_told_from_what_is_done_to_it(
    exited: Callable[[], RankExited], signature: str, is_external: bool
) -> None:
    fault = exit_fault(exited(), 0.0)
    assert (fault.signature, fault.is_external) == (signature, is_external)


@pytest.mark.parametrize(
    ("exited", "how"),
    [
        (
            lambda: _exited(message="did not leave generation 3 within 0.5 s"),
            "SIGKILL: did not leave generation 3 within 0.5 s",
        ),
        (lambda: _exited(message="killed by SIGKILL"), "(pid 1) was killed by SIGKILL"),
        (lambda: _exited(fault_point="in_vote of step 4", message="killed at fault point in_vote"), "in_vote of step 4"),
    ],
)
def test_why_a_host_killed_a_rank_is_said(exited: Callable[[], RankExited], how: str) -> None:
    fault = exit_fault(exited(), 0.0)
    assert fault.message.endswith(how) and fault.is_external


# --- a network that breaks every connection ------------------------------------------------------------------------------


def broken_links(count: int) -> tuple[Failure, ...]:
    fault = Fault(cause=Cause.LINK_LOST, message="broke", at=0.0, is_external=True)
    return tuple(Failure(fault=fault, generation=Generation(n), step=Step(4), was_formed=True) for n in range(count))


def test_connections_that_broke_a_few_times_are_made_anew_at_once() -> None:
    assert [rest_s(broken_links(count)) for count in range(TRIES + 1)] == [0.0] * (TRIES + 1)


def test_a_network_that_breaks_every_connection_is_left_alone_for_longer_each_time() -> None:
    rests = [rest_s(broken_links(count)) for count in range(64)]
    assert rests[TRIES + 1 : TRIES + 4] == [0.5, 1.0, 2.0] and max(rests) == rests[-1] == MAX_REST_S
    assert sum(rests) > 500, "a budget of 64 lasts for minutes"


def test_another_kind_of_failure_and_a_committed_step_end_the_rests() -> None:
    other = Failure(
        fault=Fault(cause=Cause.NODE_LOST, message="gone", at=0.0), generation=Generation(9), step=Step(4), was_formed=True
    )
    assert rest_s((*broken_links(9), other)) == 0.0
    assert rest_s(tuple(replace(failure, counts=False) for failure in broken_links(9))) == 0.0


def test_the_next_generation_is_formed_after_the_rest_and_no_sooner() -> None:
    bench = trained()

    def break_off() -> None:
        generation = bench.record.generation
        reports = [a_report(d, generation=generation, voted=3, passed=3, held=3) for d in bench.plan.devices]
        bench.reports(replace(reports[0], lost_peer=Rank(1)), *reports[1:])

    for number in range(1, TRIES + 1):
        break_off()
        assert bench.form().generation == number + 1
        bench.ready()
    break_off()
    assert bench.said_to_people().count("resting") == 1 and not bench.calls(FormGeneration)
    ((key, seconds),) = [(k, s) for k, s in deadlines(bench.record).items() if k.startswith("rest:")]
    assert seconds == REST_S
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert bench.form().generation == TRIES + 2
    assert isinstance(bench.ready().passed(4).state, Running) and rest_s(bench.record.failures) == 0.0
