"""Spares as the kernel keeps them: claimed from idle nodes, prepared, taken without planning, replaced, and given back."""

from __future__ import annotations

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.events import CancelRequested, CordonRequested, DeadlinePassed, HostClosed
from orchestrator.domain.host_events import HostOpened, RankExited
from orchestrator.domain.ids import Device, JobId, NodeId
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.requests import CloseGeneration, CloseHost, FormGeneration, OpenHost, PrepareSeats
from orchestrator.domain.rungs import Rung
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import Cancelled, Reforming, Running, Starting
from orchestrator.supervisor.arbitrating import claimed as taken_by
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import JOB, Bench, a_report, a_spec

N1, N4, N5 = NodeId("n1"), NodeId("n4"), NodeId("n5")


def claimed(nodes: int = 5, spec: JobSpec | None = None) -> Bench:
    return Bench(nodes=nodes, spec=spec or a_spec(tp=2, pp=2, dp=2, spares=1)).running().passed(1, 2, 3)


def standing_by(nodes: int = 5, spec: JobSpec | None = None) -> Bench:
    """n4's ranks are forked and built."""
    bench = claimed(nodes, spec).said(N4, HostOpened(seconds=1.0))
    ((node, asked),) = bench.calls(PrepareSeats)
    assert node == N4
    return bench.said(N4, bench.seats(asked.generation, asked.devices))


def holding(step: int, generation: int = 1):  # type: ignore[no-untyped-def]
    return lambda device: a_report(device, generation=generation, voted=step, passed=step, held=step)


def reforming(bench: Bench) -> Reforming:
    assert isinstance(bench.state, Reforming)
    return bench.state


# --- standing by ---------------------------------------------------------------------------------------------------------


def test_an_idle_node_is_claimed_opened_and_built_for_the_plan_that_runs() -> None:
    bench = claimed()
    assert set(bench.record.spares) == {N4} and N4 in bench.record.hosts
    assert set(bench.record.spares[N4].devices) <= taken_by(bench.record)
    bench.said(N4, HostOpened(seconds=1.0))
    ((node, asked),) = bench.calls(PrepareSeats)
    assert (node, asked.stand_by, len(asked.devices)) == (N4, bench.plan, 2)
    assert not bench.record.spares[N4].is_ready
    bench.said(N4, bench.seats(asked.generation, asked.devices))
    assert bench.record.spares[N4].is_ready and bench.said_to_people().count("spare_ready") == 1


def test_no_spares_are_kept_unless_asked_for() -> None:
    assert not claimed(spec=a_spec(tp=2, pp=2, dp=2)).record.spares


def test_a_job_that_could_use_every_node_leaves_one_for_its_spare() -> None:
    bench = Bench(nodes=5, spec=a_spec(micro_batches=16, spares=1)).running()
    assert set(bench.record.spares) == {N4} and set(bench.plan.nodes) == {f"n{number}" for number in range(4)}
    bench.passed(1)
    assert bench.record.target is None and isinstance(bench.state, Running), "a spare is no reason to grow"


def test_a_job_that_needs_every_node_has_no_spare_and_says_nothing_of_waiting() -> None:
    bench = Bench(nodes=4, spec=a_spec(tp=2, pp=2, dp=2, spares=1)).running()
    assert isinstance(bench.state, Running) and not bench.record.spares


def test_too_small_a_node_is_no_spare() -> None:
    bench = Bench(nodes=4, spec=a_spec(tp=2, pp=2, dp=2, spares=1)).running().add_node(4, devices=1)
    assert not bench.record.spares
    assert set(bench.add_node(5).record.spares) == {N5}


def test_a_form_for_others_is_not_sent_to_who_stands_by() -> None:
    bench = standing_by()
    bench.exited(bench.device(0)).all_report(holding(3)).prepared()
    assert N4 not in {node for node, _ in bench.calls(FormGeneration)}
    assert N4 not in {node for node, _ in bench.calls(CloseGeneration)}
    bench.ready()
    ((node, asked),) = bench.calls(PrepareSeats)
    assert node == N4 and asked.generation == 2, "built for the plan of the new generation"


# --- taking over ---------------------------------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_without_planning_or_preparing() -> None:
    bench = standing_by()
    before, effects = bench.plan, len(bench.effects)
    bench.host_gone(N1)
    assert reforming(bench).forming is not None and not bench.record.planning
    bench.all_report(holding(3))
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.generation == 2
    assert form.plan.devices == tuple(Device(N4, d.index) if d.node == N1 else d for d in before.devices)
    asked = [effect for effect in list(bench.effects.values())[effects:] if isinstance(effect, ChoosePlan)]
    assert not asked
    assert not bench.record.spares
    bench.ready().passed(4)
    incident = bench.record.incidents[-1]
    assert incident.rung is Rung.SPARE and incident.pause_s is not None and "n4 takes the place of n1" in incident.decision
    assert incident.predicted_pause_s is not None and set(incident.phases) <= set(incident.predicted)
    assert incident.options[0].rung is Rung.SPARE and all(option.why for option in incident.options)


def test_survivors_that_feel_it_first_get_the_spare_once_it_is_known_why() -> None:
    bench = standing_by()
    victim = next(seat for seat in bench.plan.seats if seat.device.node == N1)
    witness = next(seat.device for seat in bench.plan.seats if seat.device.node != N1)
    bench.reports(a_report(witness, voted=3, passed=3, held=3, lost_peer=victim.rank))
    assert bench.record.incidents[-1].rung is Rung.FORK
    bench.host_gone(N1)
    assert bench.record.incidents[-1].rung is Rung.SPARE and len(bench.record.incidents) == 1
    bench.all_report(holding(3))
    assert N4 in bench.form().plan.nodes and bench.record.generation == 3


def test_the_next_idle_node_becomes_the_next_spare() -> None:
    bench = standing_by(nodes=6)
    bench.host_gone(N1).lose_node(N1).all_report(holding(3)).ready()
    assert set(bench.record.spares) == {N5}
    assert (N5 in bench.record.hosts) and [node for node, _ in bench.calls(OpenHost)] == [N5]


def test_a_spare_that_is_not_ready_yet_is_planned_with_like_any_other_node() -> None:
    bench = claimed()
    bench.host_gone(N1).lose_node(N1)
    assert bench.record.incidents[-1].rung is Rung.REPLAN_ALL and "held once" in bench.record.at_risk
    bench.all_report(holding(3)).planned()
    assert N4 in bench.plan.nodes and not bench.record.spares
    bench.opened().prepared().ready()
    assert isinstance(bench.state, Running) and not bench.record.at_risk and bench.said_to_people()[-1] == "running"
    assert "mirrored" in bench.said_to_people()


def test_a_spare_that_dies_as_it_takes_over_is_a_second_failure() -> None:
    bench = standing_by(nodes=6)
    bench.host_gone(N1).lose_node(N1).all_report(holding(3))
    bench.host_gone(N4).lose_node(N4)
    assert reforming(bench).attempt == 2
    bench.all_report(
        lambda d: a_report(d, generation=reforming(bench).closing.generation, voted=3, passed=3, held=3, held_in=1)
    )
    bench.planned().opened().prepared().ready().passed(4)
    assert N5 in bench.plan.nodes and bench.record.committed == 4


# --- losing one ----------------------------------------------------------------------------------------------------------


def test_a_lost_spare_disturbs_nobody_and_is_replaced() -> None:
    bench = standing_by(nodes=6)
    bench.host_gone(N4).lose_node(N4)
    assert isinstance(bench.state, Running) and set(bench.record.spares) == {N5} and not bench.record.incidents
    assert "spare_lost" in bench.said_to_people()


def test_a_spare_takes_the_place_of_a_node_that_drains_while_training_goes_on() -> None:
    bench = standing_by()
    before = set(bench.plan.nodes)
    bench.tell(CordonRequested(node=N1, drain=True)).planned()
    assert isinstance(bench.state, Running) and bench.record.join is not None
    assert set(bench.record.join.plan.nodes) == before - {N1} | {N4}
    assert not bench.record.spares, "it has a seat in the next plan"


def test_no_more_spares_are_taken_than_nodes_drain_and_none_that_is_not_ready() -> None:
    spec = a_spec(tp=2, pp=2, micro_batches=16, spares=1)
    bench = standing_by(spec=spec)
    assert bench.plan.world_size == 8
    bench.tell(CordonRequested(node=N4, drain=True)).planned()
    assert bench.record.target is None, "a spare that drains itself is in nobody's way"
    bench = claimed(spec=spec)
    bench.tell(CordonRequested(node=N1, drain=True)).planned()
    assert bench.record.join is not None and not {N1, N4} & set(bench.record.join.plan.nodes)


def test_a_rank_that_dies_standing_by_is_forked_again_and_not_for_ever() -> None:
    bench = standing_by()

    def dies() -> None:
        device = bench.record.spares[N4].devices[0]
        report = a_report(device, held=None)
        bench.said(N4, RankExited(device=device, pid=bench.record.pids[device], exit_code=-9, report=report))

    for _ in range(2):
        dies()
        ((_, asked),) = bench.calls(PrepareSeats)
        assert isinstance(bench.state, Running) and not bench.record.spares[N4].is_ready
        bench.said(N4, bench.seats(asked.generation, asked.devices))
        assert bench.record.spares[N4].is_ready
    dies()
    assert not bench.record.spares and bench.calls(CloseHost) == [(N4, CloseHost())] and N4 in bench.record.avoided
    bench.tell(HostClosed(job=JOB, node=N4))
    assert set(bench.record.spares) == {N4}, "a new host is tried"


def test_a_spare_that_does_not_get_ready_or_falls_silent_is_given_up() -> None:
    slow = claimed()
    assert "spare:1" in deadlines(slow.record)
    slow.tell(DeadlinePassed(job=JOB, key="spare:1"))
    assert not slow.record.spares and slow.calls(CloseHost)
    silent = standing_by()
    assert "spare:1" not in deadlines(silent.record)
    silent.host_silent(N4)
    assert set(silent.record.spares) == {N4} and "spare:1" in deadlines(silent.record)
    silent.host_gone(N1)
    assert silent.record.incidents[-1].rung is not Rung.SPARE, "who does not answer is not relied on"


def test_an_ended_job_gives_its_spares_back() -> None:
    bench = standing_by()
    bench.tell(CancelRequested(job=JobId("job")))
    assert (N4, CloseHost()) in bench.calls(CloseHost)
    for node in list(bench.record.hosts):
        bench.tell(HostClosed(job=JOB, node=node))
    assert isinstance(bench.state, Cancelled) and not bench.record.spares


# --- at risk -------------------------------------------------------------------------------------------------------------


def test_a_job_whose_mirrors_share_a_node_says_so() -> None:
    bench = Bench(nodes=2, spec=a_spec()).running().passed(1)
    assert not bench.record.at_risk
    bench.host_gone(N1).lose_node(N1).planned().all_report(holding(1)).prepared().ready()
    assert bench.record.at_risk == "all mirrors are on n0 with their owners; add a node"
    told = [entry for entry in bench.history if entry.type == "at_risk"]
    assert len(told) == 1 and "one more failure may cost committed steps" in told[0].message


def test_a_job_without_mirrors_is_not_told_of_it_again_and_again() -> None:
    bench = Bench(nodes=1, spec=a_spec(mirrors=0)).submitted().probed().planned()
    assert isinstance(bench.state, Starting)
    assert not bench.opened().prepared().ready().record.at_risk
