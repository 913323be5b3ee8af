"""A generation's session in real processes: groups, partners, the vote, every way out, many generations in one process."""

from __future__ import annotations

import gc
import resource
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Child, Ranks, run_all, tell
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Rank
from orchestrator.domain.layout import Move, buckets, partners
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import Interval, Line, Profile
from worker.parallel.group import Aborted, PeerLost
from worker.progress import Unwatched
from worker.session import Session

pytestmark = pytest.mark.timeout(120)

AT_ONCE_S = 5.0
"""On any machine; every limit that could end a wait here instead is at least twice as long."""

PROFILE = Profile(
    num_layers=4,
    lines=(
        Line(name="embedding", shape=(128, 8), split=True, layers=(0, 3), decay=True),
        *(Line(name=f"w{i}", shape=(128, 4), split=True, layers=(i,), decay=True) for i in range(4)),
        *(Line(name=f"norm{i}", shape=(64,), split=False, layers=(i,), decay=False) for i in range(4)),
    ),
    divisors=(),
    activation_bytes=0,
)


def a_plan(*depths: int, tp: int) -> Plan:
    """One pipeline per depth, each on a node of its own, the four layers cut evenly."""
    pipelines = []
    for p, depth in enumerate(depths):
        width = PROFILE.num_layers // depth
        stages = tuple(
            Stage(
                first=s * width,
                last=(s + 1) * width,
                devices=tuple(Device(NodeId(f"n{p}"), s * tp + t) for t in range(tp)),
            )
            for s in range(depth)
        )
        pipelines.append(Pipeline(stages=stages, micro_batches=(2 * p, 2 * p + 1)))
    return Plan(pipelines=tuple(pipelines))


CUBE = a_plan(2, 2, tp=2)
UNEQUAL = a_plan(2, 1, tp=1)


class Watch(Unwatched):
    """Counts what a session tells its watcher."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.depth = 0

    def enter(self, group: str) -> None:
        self.entered.append(group)
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1


def a_session(
    child: Child,
    plan: Plan,
    *,
    generation: int = 1,
    backend: Any = "links",
    moves: tuple[Move, ...] = (),
    watch: Any = None,
) -> Session:
    seat = plan.seats[child.rank]
    return Session(
        plan=plan,
        profile=PROFILE,
        seat=seat,
        generation=Generation(generation),
        job=JobId("job-1"),
        listener=child.listener,
        addresses={s.device: child.addresses[s.rank] for s in plan.seats},
        mirrors=1,
        moves=moves,
        backend=backend,
        progress=watch or Unwatched(),
        form_timeout_s=60.0,
    )


def one_step(session: Session) -> tuple[list[float], float]:
    """A little of everything a step does; returns the bucket sums and the vote."""
    me = session.seat.rank
    total = session.tp.all_reduce(torch.full((3,), float(me)))
    assert total[0].item() == sum(session.tp.members)
    sums = []
    for bucket in buckets(session.plan, session.profile):
        if me not in bucket.members:
            continue
        group = session.group(bucket.members)
        assert group is session.group(bucket.members) and group.members[group.index] == me
        cuts = [stop - start for start, stop in bucket.shares.values()]
        mine = torch.full((bucket.size,), float(me + 1))
        parts, outputs = [], []
        for start, stop in bucket.shares.values():
            parts.append(mine[start:stop])
            outputs.append(torch.empty(cuts[group.index]))
        group.all_to_all(outputs, parts)
        own = sum(outputs, torch.zeros(cuts[group.index]))
        assert bool((own == sum(rank + 1 for rank in bucket.members)).all())
        sums.append(own.sum().item())
    if session.mirror_of is not None and session.mirrored is not None:
        given = torch.empty(5)
        posted = session.post([(session.mirror_of, torch.full((5,), float(me)))], [(session.mirrored, given)])
        posted.wait()
        assert given[0].item() == session.mirrored
    vote = session.vote(torch.tensor([float(me), 1.0, 0.1 * me], dtype=torch.float64))
    assert vote[0].item() == sum(range(session.plan.world_size)) and vote[1].item() == session.plan.world_size
    return sums, vote[2].item()


def open_and_step(child: Child, plan: Plan, backend: str) -> Any:
    watch = Watch()
    session = a_session(child, plan, backend=backend, watch=watch)
    began = time.perf_counter()
    session.open()
    opened = time.perf_counter() - began
    assert session.tp.members == tuple(s.rank for s in plan.seats if _column(s) == _column(session.seat))
    assert session.pp.index == session.seat.stage
    sums, vote = one_step(session)
    session.exchange([(session.seat.rank, torch.ones(2))], [(session.seat.rank, torch.empty(2))])
    with pytest.raises(KeyError):
        session.group((Rank(97), Rank(98)))
    assert watch.depth == 0 and "form" in watch.entered
    session.vote(torch.zeros(1, dtype=torch.float64))  # nobody closes while another may still need it
    session.close()
    session.close()
    with pytest.raises(Aborted):
        session.exchange([], [])
    return vote, len(sums), opened


def _column(seat: Any) -> tuple[int, int]:
    return seat.pipeline, seat.stage


@pytest.mark.parametrize(
    ("plan", "backend"),
    [(CUBE, "links"), (UNEQUAL, "links"), (a_plan(1, tp=1), "links"), (a_plan(2, 2, tp=1), "gloo")],
    ids=["tp2 pp2 dp2", "depths 2 and 1", "alone", "gloo pp2 dp2"],
)
def test_groups_partners_and_vote_reach_every_rank(plan: Plan, backend: str) -> None:
    results = run_all(plan.world_size, open_and_step, plan, backend)
    assert len({vote for vote, _, _ in results}) == 1, "every rank has the same bits"
    assert results[0][0] == pytest.approx(0.1 * sum(range(plan.world_size)))
    print(f"\nopen of {plan.describe()} on {backend}: {max(t for _, _, t in results) * 1e3:.1f} ms (slowest rank)")


def test_partners_are_each_others_inverse() -> None:
    for plan in (CUBE, UNEQUAL, a_plan(2, 2, 1, tp=2)):
        partner = partners(plan)
        assert sorted(partner.values()) == sorted(partner) == sorted(plan.devices)


def exchange_moves(child: Child, plan: Plan) -> Any:
    devices = plan.devices
    # Ranks 0 and 7 differ in pipeline, stage and tp index, and neither mirrors the other.
    moves = (Move(Interval("w0", 0, 64), devices[7], devices[0]), Move(Interval("w1", 0, 64), devices[0], devices[7]))
    session = a_session(child, plan, moves=moves)
    session.open()
    me = session.seat.rank
    if me in (0, 7):
        other = Rank(7 - me)
        landed = [torch.empty(70_000), torch.empty(0), torch.empty(3, dtype=torch.int64)]
        sent = [torch.full((70_000,), float(me)), torch.empty(0), torch.full((3,), me)]
        session.exchange([(other, t) for t in sent], [(other, t) for t in landed])
        assert landed[0][-1].item() == other and landed[2].tolist() == [other] * 3
    session.vote(torch.zeros(1, dtype=torch.float64))
    session.close()
    plain = a_session(child, plan, generation=2)
    plain.open()
    refused = False
    if me == 0:
        with pytest.raises(ValueError, match="no connection to rank 7"):
            plain.exchange([(Rank(7), torch.ones(1))], [])
        refused = True
    plain.vote(torch.zeros(1, dtype=torch.float64))
    plain.close()
    return refused


def test_moves_connect_their_two_ends_and_nobody_else() -> None:
    assert run_all(8, exchange_moves, CUBE).count(True) == 1


def one_pipeline_step(child: Child, plan: Plan, backend: str) -> Any:
    session = a_session(child, plan, backend=backend)
    session.open()
    torch.manual_seed(session.seat.stage)
    module = nn.Linear(8, 8)
    stage = PipelineStage(module, session.seat.stage, 2, torch.device("cpu"), group=session.pp.pg)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    if session.seat.stage == 0:
        schedule.step(torch.ones(8, 8))
    else:
        schedule.step(target=torch.zeros(8, 8), losses=losses)
    session.vote(torch.zeros(1, dtype=torch.float64))
    session.close()
    assert module.weight.grad is not None
    return module.weight.grad.sum().item(), sum(loss.item() for loss in losses)


@pytest.mark.parametrize("backend", ["links", "gloo"])
def test_pipelining_runs_on_a_sessions_pipeline_group(backend: str) -> None:
    modules = []
    for stage in range(2):
        torch.manual_seed(stage)
        modules.append(nn.Linear(8, 8))
    loss = nn.functional.mse_loss(modules[1](modules[0](torch.ones(8, 8))), torch.zeros(8, 8))
    loss.backward()
    results = run_all(4, one_pipeline_step, a_plan(2, 2, tp=1), backend)
    for stage in range(2):
        assert results[stage][0] == pytest.approx(modules[stage].weight.grad.sum().item(), rel=1e-4)  # type: ignore[union-attr]
    assert results[1][1] == pytest.approx(4 * loss.item(), rel=1e-5)


def abort_inside(child: Child, plan: Plan, backend: str) -> Any:
    session = a_session(child, plan, backend=backend)
    session.open()
    at = [0.0]

    def abort() -> None:
        at[0] = time.monotonic()
        session.abort()
        session.abort()

    if child.rank == 0:
        threading.Timer(0.2, abort).start()
        with pytest.raises(Aborted):
            session.vote(torch.zeros(1, dtype=torch.float64))
        left = time.monotonic() - at[0]
        tell(child, left)
    child.pipe.recv()
    session.close()
    # Nothing of it is left: the next generation forms in the same processes.
    again = a_session(child, plan, generation=2, backend=backend)
    again.open()
    result = one_step(again)[1]
    again.vote(torch.zeros(1, dtype=torch.float64))
    again.close()
    return result


@pytest.mark.parametrize("backend", ["links", "gloo"])
def test_after_an_abort_the_next_generation_forms_in_the_same_processes(backend: str) -> None:
    plan = a_plan(2, 2, tp=1)
    with Ranks(4, abort_inside, plan, backend) as ranks:
        assert ranks.receive(0) < AT_ONCE_S
        for pipe in ranks.pipes:
            pipe.send("closed")
        assert len({*ranks.results()}) == 1


def abort_before_open(child: Child, plan: Plan) -> bool:
    if child.rank == 3:  # takes no part, so that nobody can finish forming
        child.pipe.recv()
    session = a_session(child, plan)
    session.abort()
    with pytest.raises(Aborted):
        session.open()
    session.close()
    waiting = a_session(child, plan, generation=2)
    threading.Timer(0.1, waiting.abort).start()
    began = time.monotonic()
    with pytest.raises(Aborted):
        waiting.open()
    waiting.close()
    return time.monotonic() - began < AT_ONCE_S


def test_abort_may_come_before_or_while_a_session_opens() -> None:
    with Ranks(4, abort_before_open, a_plan(2, 2, tp=1)) as ranks:
        assert all(ranks.receive(rank) for rank in range(3))


def survive(child: Child, plan: Plan, generation: int) -> Any:
    """Steps in generation 1 until it breaks or is closed, then takes one step in generation 2."""
    if generation == 1:
        session = a_session(child, plan)
        session.open()
        tell(child, "open")
        closed = threading.Event()

        def obey() -> None:
            child.pipe.recv()
            session.abort()
            closed.set()

        threading.Thread(target=obey).start()
        cause = None
        try:
            while True:
                one_step(session)
        except PeerLost as lost:
            cause = (lost.rank, time.monotonic())
        except Aborted:
            pass
        tell(child, cause)
        closed.wait()
        session.close()
    session = a_session(child, plan, generation=2)
    session.open()
    result = one_step(session)
    session.vote(torch.zeros(1, dtype=torch.float64))
    session.close()
    return result[1]


def test_a_killed_rank_is_replaced_by_a_new_process_on_the_same_plan() -> None:
    with Ranks(8, survive, CUBE, 1) as ranks:
        for rank in range(8):
            assert ranks.receive(rank) == "open"
        time.sleep(0.2)
        killed = ranks.kill(5)
        ranks.processes[5].join(60)
        ranks.start(5, survive, CUBE, 2)
        survivors = [rank for rank in range(8) if rank != 5]
        # Whoever is linked with it learns of it by itself, and at once; nobody accuses a survivor.
        assert wait([ranks.pipes[rank] for rank in survivors], AT_ONCE_S)
        for rank in survivors:
            ranks.pipes[rank].send("closed")
        causes = [cause for rank in survivors if (cause := ranks.receive(rank)) is not None]
        assert causes and {rank for rank, _ in causes} == {5}
        assert min(at for _, at in causes) - killed < AT_ONCE_S
        assert len({*ranks.results()}) == 1


def reopen(child: Child, plan: Plan, backend: str, count: int) -> Any:
    counts = []
    for generation in range(1, count + 1):
        session = a_session(child, plan, generation=generation, backend=backend)
        session.open()
        one_step(session)
        session.vote(torch.zeros(1, dtype=torch.float64))
        if generation % 3 == 0 and backend == "links":
            session.abort()
        session.close()
        if generation in (20, count):
            gc.collect()
            counts.append(_at_rest(*counts))
    return counts


def _at_rest(before: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Descriptors, threads, KiB resident; gloo's own threads may take a moment to let go of what they had."""
    until = time.monotonic() + 20.0
    while True:
        found = len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), _resident_kib()
        if not before or (found[0] <= before[0] and found[1] <= before[1]) or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def test_many_generations_in_one_process_leave_nothing_behind() -> None:
    for early, late in run_all(4, reopen, a_plan(2, 2, tp=1), "links", 100):
        print(f"\nafter 20 generations {early}, after 100 {late} (fds, threads, KiB resident)")
        assert late[0] <= early[0] and late[1] <= early[1]
        assert late[2] - early[2] < 2048


def test_generations_on_gloo_leave_nothing_behind_when_closed_in_good_order() -> None:
    for early, late in run_all(2, reopen, a_plan(2, tp=1), "gloo", 40):
        assert late[0] <= early[0] and late[1] <= early[1]


def lose_a_peer_on_gloo(child: Child, plan: Plan) -> Any:
    session = a_session(child, plan, backend="gloo")
    session.open()
    session.vote(torch.zeros(1, dtype=torch.float64))
    tell(child, "open")
    if child.rank == 1:
        time.sleep(60)
    with pytest.raises(PeerLost) as caught:
        session.pp.all_reduce(torch.ones(4))
    at = time.monotonic()
    session.close()
    return caught.value.rank, at


def test_on_gloo_a_killed_peer_is_named_by_its_link() -> None:
    with Ranks(2, lose_a_peer_on_gloo, a_plan(2, tp=1)) as ranks:
        assert ranks.receive(0) == ranks.receive(1) == "open"
        time.sleep(0.1)
        killed = ranks.kill(1)
        rank, at = ranks.receive(0)
    assert rank == 1 and at - killed < AT_ONCE_S
