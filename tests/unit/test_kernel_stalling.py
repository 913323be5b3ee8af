"""A host says that a rank stands still: all hosts are asked, and what they see together decides who pays for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.domain.events import DeadlinePassed, HostClosed, ReleaseRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.host_events import RankExited, RanksSeen, RanksStalled
from orchestrator.domain.ids import Device, NodeId, Rank, Step
from orchestrator.domain.requests import CloseGeneration, CloseHost, FormGeneration, KillRank, LookAround
from orchestrator.domain.sight import Phase, RankSight, Traffic
from orchestrator.domain.state import Failed, Reforming, Running, Stopping
from orchestrator.supervisor.deadlines import BAR_S, LOOK_S, MAX_BAR_S, deadlines
from orchestrator.supervisor.stalling import FORGOTTEN_S, FRESH_S, LOOK_AGAIN_S, MAX_BAD_ENDS, SILENT_STEPS, SILENT_STILL_S
from tests.builders import JOB, Bench, a_report, a_spec

N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))


def trained() -> Bench:
    return Bench(spec=a_spec(tp=2, pp=2, dp=2)).running().passed(1, 2, 3)


def sights(bench: Bench, **changes: RankSight) -> dict[Device, RankSight]:
    """Everybody waits in the vote for rank 3, which does not wait: changes by the rank's number, r0=..."""
    seen = {}
    for seat in bench.plan.seats:
        sight = RankSight(
            device=seat.device,
            generation=bench.record.generation,
            phase=Phase.VOTE,
            step=Step(4),
            still_s=1.2,
            in_wait=seat.rank != 3,
            group="vote",
            collective=40,
            traffic={Rank(3): Traffic(sent=4, received=3, awaits=True)} if seat.rank != 3 else {},
        )
        seen[seat.device] = changes.get(f"r{seat.rank}", sight)
    return seen


def guilty(bench: Bench) -> RankSight:
    return replace(sights(bench)[bench.device(3)], is_guilty=True, why="has slept outside any wait for 1.5 s")


def stalled(bench: Bench, node: NodeId, seen: dict[Device, RankSight]) -> Bench:
    here = tuple(sight for device, sight in seen.items() if device.node == node)
    return bench.said(node, RanksStalled(generation=bench.record.generation, sights=here, why="n1/1 has slept"))


def answer(bench: Bench, seen: dict[Device, RankSight], nodes: Iterable[NodeId] = (N0, N1, N2, N3)) -> Bench:
    for node in nodes:
        looking = bench.record.looking
        if looking is None:
            break
        here = tuple(sight for device, sight in seen.items() if device.node == node)
        bench.said(node, RanksSeen(generation=looking.generation, number=looking.number, sights=here))
    return bench


def asked(bench: Bench) -> set[NodeId]:
    return {node for node, _ in bench.calls(LookAround)}


def test_the_culprit_is_killed_with_its_stack_kept_and_those_who_wait_are_closed_like_any_survivor() -> None:
    bench = trained()
    culprit = bench.device(3)
    seen = sights(bench, r3=guilty(bench))
    stalled(bench, culprit.node, seen)
    assert asked(bench) == {N0, N1, N2, N3} and isinstance(bench.state, Running)
    answer(bench, seen)
    ((node, kill),) = bench.calls(KillRank)
    assert isinstance(kill, KillRank) and node == culprit.node
    assert (kill.device, kill.dump, kill.pid) == (culprit, True, bench.record.pids[culprit])
    assert kill.mark == seen[culprit].mark and "7 ranks wait for it" in kill.why
    assert isinstance(bench.state, Reforming) and bench.record.looking is None
    fault = bench.state.fault
    assert fault.cause is Cause.HANG and fault.devices == (culprit,)
    assert fault.at == bench.now - 1.2 and fault.signature == "hang in VOTE" and not fault.is_external
    assert (
        f"rank 3 on {culprit} (in VOTE of step 4) has slept outside any wait for 1.5 s; 7 ranks wait for it"
        in fault.message
    )
    # Its own end is no news, but for where it stood.
    report = a_report(culprit, generation=1, held=None)
    pid = bench.record.pids[culprit]
    bench.said(
        culprit.node, RankExited(device=culprit, pid=pid, exit_code=-9, report=report, stack=("Thread 0x1", "  File x"))
    )
    bench.prepared().all_report(lambda device: a_report(device, voted=3, passed=3, held=3))
    bench.ready().passed(4)
    (incident,) = bench.record.incidents
    assert incident.fault == fault and incident.stack == ("Thread 0x1", "  File x") and incident.rolled_back == 0
    assert bench.record.false_alarms == 0


def test_a_process_that_somebody_stopped_is_no_fault_of_the_program() -> None:
    bench = trained()
    stopped = replace(guilty(bench), is_stopped=True, why="has been stopped (SIGSTOP) for 0.5 s")
    seen = sights(bench, r3=stopped)
    answer(stalled(bench, N1, seen), seen)
    assert isinstance(bench.state, Reforming) and bench.state.fault.is_external and not bench.state.fault.signature


def test_everybody_is_asked_once_however_many_hosts_complain() -> None:
    bench = trained()
    seen = sights(bench)
    stalled(bench, N0, seen)
    first = bench.record.looking
    stalled(bench, N1, seen)
    assert bench.record.looking == first and not bench.calls(LookAround)


def test_what_was_seen_before_nobody_governed_for_a_while_is_looked_at_again() -> None:
    """A supervisor slept, or is another one's successor: who had stopped then may do what it should by now."""
    bench = trained()
    culprit, seen = bench.device(3), sights(bench, r3=guilty(bench))
    stalled(bench, culprit.node, seen)
    bench.now += FRESH_S
    answer(bench, seen)
    assert asked(bench) == {N0, N1, N2, N3} and not bench.calls(KillRank) and isinstance(bench.state, Running)
    moved = replace(seen[culprit], is_guilty=False, why="", still_s=0.0, in_wait=True)
    answer(bench, sights(bench, r3=moved))
    assert isinstance(bench.state, Running) and bench.record.looking is None


def test_where_asking_takes_long_what_was_seen_counts_in_the_end() -> None:
    bench = trained()
    culprit, seen = bench.device(3), sights(bench, r3=guilty(bench))
    stalled(bench, culprit.node, seen)
    for _ in range(3):
        bench.now += 3 * FRESH_S
        answer(bench, seen)
    assert isinstance(bench.state, Reforming) and bench.state.fault.devices == (culprit,)


def test_a_clock_that_was_set_back_costs_no_more_than_another_look() -> None:
    bench = trained()
    culprit, seen = bench.device(3), sights(bench, r3=guilty(bench))
    stalled(bench, culprit.node, seen)
    bench.now -= 100.0
    answer(answer(bench, seen), seen)
    assert isinstance(bench.state, Reforming)


def test_a_look_goes_with_the_generation_it_was_about() -> None:
    """Nobody has answered it yet: a rank that hangs in the next generation is not to wait for that."""
    bench = trained()
    stalled(bench, N0, sights(bench))
    assert bench.record.looking is not None
    bench.exited(bench.device(5))
    assert bench.record.looking is None
    bench.prepared().all_report(lambda device: a_report(device, voted=3, passed=3, held=3)).ready()
    stalled(bench, N1, sights(bench))
    assert asked(bench) == {N0, N1, N2, N3}


def test_complaints_of_another_generation_are_nothing() -> None:
    bench = trained()
    late = RanksStalled(generation=type(bench.record.generation)(7), sights=(), why="?")
    assert bench.said(N0, late).record.looking is None


def test_ranks_that_have_moved_on_are_a_false_alarm_and_counted() -> None:
    bench = trained()
    seen = {device: replace(sight, still_s=0.02) for device, sight in sights(bench).items()}
    answer(stalled(bench, N0, seen), seen)
    assert isinstance(bench.state, Running) and bench.record.false_alarms == 1 and not bench.calls(KillRank)
    assert any(entry.type == "false_alarm" for entry in bench.history)


def test_a_rank_that_merely_takes_long_is_left_alone_and_is_no_false_alarm() -> None:
    bench = trained()
    answer(stalled(bench, N0, sights(bench)), sights(bench))
    assert isinstance(bench.state, Running) and bench.record.false_alarms == 0 and bench.record.looking is None


def waiting(bench: Bench, still_s: float) -> dict[Device, RankSight]:
    return {device: replace(sight, still_s=still_s) for device, sight in sights(bench).items()}


def answer_all_but(bench: Bench, silent: NodeId, seen: dict[Device, RankSight]) -> Bench:
    return answer(bench, seen, [node for node in bench.nodes if node != silent])


def look_deadline(bench: Bench) -> tuple[str, float]:
    ((key, seconds),) = [(k, s) for k, s in deadlines(bench.record).items() if k.startswith("look:")]
    return key, seconds


def test_a_silent_host_whose_ranks_everybody_waits_for_is_given_up() -> None:
    """Power was lost and nothing says so: no connection is reset, no process is seen to end."""
    bench = trained()
    seen = waiting(bench, SILENT_STILL_S)
    silent = bench.device(3).node
    on_it = {device for device in bench.plan.devices if device.node == silent}
    stalled(bench, N0, seen)
    answer_all_but(bench, silent, seen)
    assert bench.record.looking is not None, "one has yet to answer"
    bench.host_silent(silent)
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.NODE_LOST
    assert bench.state.lost == on_it and "6 ranks have waited" in bench.state.fault.message
    assert {node for node, _ in bench.calls(CloseHost)} == {silent}


def test_a_host_known_to_be_silent_is_not_waited_for() -> None:
    bench = trained()
    seen = waiting(bench, SILENT_STILL_S)
    silent = bench.device(3).node
    bench.host_silent(silent)
    assert asked(bench) == set(bench.nodes) - {silent}, "whether anybody waits for it is asked without a complaint"
    answer_all_but(bench, silent, seen)
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.NODE_LOST


def test_a_cable_that_is_put_back_at_once_costs_nobody_a_node() -> None:
    bench = trained()
    silent = bench.device(3).node
    bench.host_silent(silent)
    answer_all_but(bench, silent, waiting(bench, 0.9))
    key, after_s = look_deadline(bench)
    assert isinstance(bench.state, Running) and abs(after_s - (SILENT_STILL_S - 0.9)) < 1e-9
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert asked(bench) == set(bench.nodes) - {silent}
    answer_all_but(bench, silent, waiting(bench, 0.01))
    assert isinstance(bench.state, Running) and bench.record.looking is None
    assert bench.record.false_alarms == 0, "nobody had complained"


def test_a_host_that_answers_again_ends_the_wait_for_another_look() -> None:
    bench = trained()
    silent = bench.device(3).node
    bench.host_silent(silent)
    answer_all_but(bench, silent, waiting(bench, 0.9))
    assert bench.host_heard(silent).record.looking is None


def test_a_complaint_is_looked_into_at_once_whatever_was_put_off() -> None:
    bench = trained()
    silent = bench.device(3).node
    bench.host_silent(silent)
    answer_all_but(bench, silent, waiting(bench, 0.9))
    stalled(bench, bench.device(0).node, waiting(bench, SILENT_STILL_S))
    answer_all_but(bench, silent, waiting(bench, SILENT_STILL_S))
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.NODE_LOST


def test_a_silent_host_is_not_given_up_for_a_wait_that_is_usual() -> None:
    """Its link to the supervisor is lost and training goes on, with steps of five seconds."""
    bench = trained()
    for number in range(4, 9):
        bench.now += 5.0
        bench.passed(number)
    silent = bench.device(3).node
    bench.host_silent(silent)
    answer_all_but(bench, silent, waiting(bench, 4.0))
    assert isinstance(bench.state, Running) and bench.record.typical_step_s is not None
    assert look_deadline(bench)[1] == SILENT_STEPS * bench.record.typical_step_s - 4.0 > 5.0


def test_where_nothing_was_committed_yet_only_a_complaint_says_that_a_wait_is_long() -> None:
    bench = Bench(spec=a_spec(tp=2, pp=2, dp=2)).running()
    silent, seen = bench.device(3).node, waiting(bench, 2.0)
    bench.host_silent(silent)
    answer_all_but(bench, silent, seen)
    assert isinstance(bench.state, Running) and bench.record.looking is None
    told = {device: replace(sight, why="has waited 3.1 s") for device, sight in waiting(bench, 3.1).items()}
    stalled(bench, bench.device(0).node, told)
    answer_all_but(bench, silent, told)
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.NODE_LOST


def test_a_host_that_is_merely_slow_to_answer_is_not_given_up() -> None:
    bench = trained()
    stalled(bench, N0, sights(bench))
    answer(bench, sights(bench), (N0, N2, N3))
    (key,) = [key for key in deadlines(bench.record) if key.startswith("look:")]
    assert deadlines(bench.record)[key] == LOOK_S
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert isinstance(bench.state, Running) and bench.record.looking is None


def test_while_a_host_is_silent_who_was_late_with_an_answer_is_asked_again() -> None:
    bench = trained()
    silent, seen = bench.device(3).node, waiting(bench, SILENT_STILL_S)
    late = bench.device(7).node
    bench.host_silent(silent)
    answer(bench, seen, [node for node in bench.nodes if node not in (silent, late)])
    bench.tell(DeadlinePassed(job=JOB, key=look_deadline(bench)[0]))
    assert isinstance(bench.state, Running) and look_deadline(bench)[1] == LOOK_AGAIN_S
    bench.tell(DeadlinePassed(job=JOB, key=look_deadline(bench)[0]))
    answer_all_but(bench, silent, seen)
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.NODE_LOST


def test_a_control_plane_that_reaches_nobody_concludes_nothing() -> None:
    bench = trained()
    stalled(bench, N0, sights(bench))
    for node in bench.nodes:
        bench.host_silent(node)
    assert isinstance(bench.state, Running) and bench.record.looking is None


def lost_link(bench: Bench, a: int, b: int) -> dict[Device, RankSight]:
    """All wait for rank b, which waits for what rank a has sent."""
    seen = {}
    for device, sight in sights(bench).items():
        rank = bench.plan.seat_of[device].rank
        traffic = {Rank(b): Traffic(sent=4, received=4, awaits=True)}
        if rank == b:
            traffic = {Rank(r): Traffic(sent=4, received=3 if r == a else 4, awaits=r == a) for r in range(8)}
        seen[device] = replace(sight, in_wait=True, traffic=traffic)
    return seen


def test_a_link_that_lost_messages_is_made_anew_once_it_was_found_twice() -> None:
    bench = trained()
    seen = lost_link(bench, 0, 5)
    answer(stalled(bench, N0, seen), seen)
    assert isinstance(bench.state, Running) and bench.record.looking is not None, "two hosts never look at one instant"
    answer(bench, seen)
    assert isinstance(bench.state, Reforming) and not bench.calls(KillRank)
    fault = bench.state.fault
    assert fault.cause is Cause.LINK_LOST and fault.devices == (bench.device(0), bench.device(5)) and fault.is_external
    assert {node for node, _ in bench.calls(CloseGeneration)} == set(bench.nodes)
    before = bench.plan
    bench.prepared().all_report(lambda device: a_report(device, voted=3, passed=3, held=3))
    assert bench.plan.pipelines == before.pipelines and bench.calls(FormGeneration)


def test_a_link_that_was_seen_lost_and_works_by_the_second_look_is_left_alone() -> None:
    bench = trained()
    seen = lost_link(bench, 0, 5)
    answer(stalled(bench, N0, seen), seen)
    moved = {device: replace(sight, collective=41, still_s=0.01) for device, sight in seen.items()}
    answer(bench, moved)
    assert isinstance(bench.state, Running) and bench.record.false_alarms == 1


def test_the_same_link_a_second_time_costs_the_node_that_is_in_more_of_them() -> None:
    bench = trained()
    worst = bench.device(5).node
    for number, (a, b) in enumerate(((0, 5), (1, 5), (0, 5)), start=1):
        seen = lost_link(bench, a, b)
        answer(answer(stalled(bench, N0, seen), seen), seen)
        assert isinstance(bench.state, Reforming) and len(bench.record.lost_links) == number
        if number < 3:
            assert not bench.calls(CloseHost)
            bench.recovered()
    assert {node for node, _ in bench.calls(CloseHost)} == {worst}


def test_a_link_that_was_good_for_an_hour_is_lost_for_the_first_time_again() -> None:
    bench = trained()
    for between_s in (FORGOTTEN_S, FORGOTTEN_S, 0.9 * FORGOTTEN_S):
        assert not bench.calls(CloseHost)
        seen = lost_link(bench, 0, 5)
        answer(answer(stalled(bench, N0, seen), seen), seen)
        assert isinstance(bench.state, Reforming) and len(bench.record.lost_links) == 1
        bench.recovered()
        bench.now += between_s
    seen = lost_link(bench, 0, 5)
    answer(answer(stalled(bench, N0, seen), seen), seen)
    assert len(bench.calls(CloseHost)) == 1 and len(bench.record.lost_links) == 2


def one_end_given_up(bench: Bench) -> NodeId:
    """The link of ranks 0 and 5 is lost, made anew, and lost again; the node that pays for it."""
    while True:
        seen = lost_link(bench, 0, 5)
        answer(answer(stalled(bench, N0, seen), seen), seen)
        if closed := bench.calls(CloseHost):
            return closed[0][0]
        bench.recovered()


def bar(bench: Bench) -> tuple[str, float]:
    ((key, seconds),) = [(k, s) for k, s in deadlines(bench.record).items() if k.startswith("bar:")]
    return key, seconds


def test_a_node_that_was_given_up_for_its_links_is_not_used_at_once_again() -> None:
    """It answers the supervisor, so nothing else would keep it from being used, and from stopping everybody again."""
    bench = Bench(spec=a_spec(tp=2, pp=2, dp=None)).running().passed(1, 2, 3)
    bad = one_end_given_up(bench)
    bench.planned()
    bench.recovered().passed(4).tell(HostClosed(job=JOB, node=bad))
    assert bad not in bench.record.hosts | bench.record.avoided and not bench.record.planning
    key, seconds = bar(bench)
    assert seconds == BAR_S
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert bench.record.planning and {d for d, _ in bench.asked().devices} >= {Device(bad, 0), Device(bad, 1)}


def test_a_node_with_a_bad_link_is_used_where_nothing_fits_without_it() -> None:
    bench = trained()
    bad = one_end_given_up(bench)
    bench.planned()
    assert isinstance(bench.state, Reforming) and bench.state.waiting and not bench.record.barred
    bench.host_closed(bad)
    assert bad in bench.plan.nodes


def test_each_time_it_is_kept_out_for_longer_until_an_operator_releases_it() -> None:
    bench = trained()
    bad = one_end_given_up(bench)
    for times, seconds in ((1, BAR_S), (4, 8 * BAR_S), (40, MAX_BAR_S)):
        (found,) = [s for key, s in deadlines(replace(bench.record, bad_ends={bad: times})).items() if "bar" in key]
        assert found == seconds
    bench.tell(ReleaseRequested(node=bad))
    assert not bench.record.barred and not bench.record.bad_ends


def test_how_often_it_was_given_up_is_forgotten_like_a_lost_link_and_kept_of_so_many_nodes() -> None:
    bench = trained()
    gone = [NodeId(f"gone-{number}") for number in range(MAX_BAD_ENDS + 5)]
    before = {node: 9 for node in gone}
    bench.kernel = replace(bench.kernel, jobs={JOB: replace(bench.record, bad_ends=before, links_lost_at=bench.now)})
    bad = one_end_given_up(bench)
    assert dict(bench.record.bad_ends) == {**dict.fromkeys(gone[6:], 9), bad: 1}, "the oldest are forgotten"
    bench.planned()
    bench.host_closed(bad)
    bench.recovered()
    bench.now += FORGOTTEN_S
    bench.kernel = replace(bench.kernel, jobs={JOB: replace(bench.record, barred=frozenset(gone[-1:]))})
    lost_anew = lost_link(bench, 0, 5)
    answer(answer(stalled(bench, N0, lost_anew), lost_anew), lost_anew)
    assert bench.record.bad_ends == {gone[-1]: 9}, "how long its bar lasts is told by it"


def test_a_circle_found_twice_fails_the_job_and_kills_nobody() -> None:
    bench = trained()
    seen = {
        device: replace(
            sight,
            in_wait=True,
            group=f"tp[{rank},{(rank + 1) % 8}]",
            traffic={Rank((rank + 1) % 8): Traffic(sent=4, received=4, awaits=True)},
        )
        for rank, (device, sight) in enumerate(sights(bench).items())
    }
    # What everybody has sent to the one who waits for it, it has received.
    for rank, device in enumerate(list(seen)):
        back = {Rank((rank - 1) % 8): Traffic(sent=4, received=4)}
        seen[device] = replace(seen[device], traffic={**seen[device].traffic, **back})
    answer(stalled(bench, N0, seen), seen)
    assert isinstance(bench.state, Running)
    answer(bench, seen)
    assert isinstance(bench.state, Stopping) and isinstance(bench.state.outcome, Failed)
    assert "do not call" in bench.state.outcome.message or "does not call" in bench.state.outcome.message
    assert not bench.calls(KillRank)


def test_a_watch_that_does_not_look_is_told() -> None:
    bench = trained()
    seen = sights(bench)
    stalled(bench, N0, seen)
    looking = bench.record.looking
    assert looking is not None
    bench.said(N2, RanksSeen(generation=looking.generation, number=looking.number, sights=(), looked_s_ago=9.0))
    assert any(entry.type == "watch_asleep" and "n2" in entry.message for entry in bench.history)
