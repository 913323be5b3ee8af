"""A job moves to another plan without stopping for it: newcomers receive their state while it trains, then it pauses.

prepare newcomers ─> begin: copy, then keep current ─> all caught up ─> stop between two steps ─> reform (reforming.py)
     any newcomer dies, any host goes silent: training goes on without them, and the plan is made anew
     a source breaks off: another one gives what it was to give; in the end the pause has to do it
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import JoinerAt, JoinFailed, SeatsPrepared
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.layout import Layout, layout, transfers
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Interval
from orchestrator.domain.requests import BeginJoin, KillRank, PrepareSeats, StopAfter
from orchestrator.domain.state import Join, Running

from .deadlines import MAX_JOINS
from .draft import Draft
from .reforming import begin_reform

MAX_ATTEMPTS = 3
"""Sources that may break off in one join before what is lacking is left to the pause."""


def advance_join(draft: Draft) -> None:
    """The hosts of a larger plan are warm, and nobody is silent: take the next step towards it."""
    state, target, join = draft.state, draft.record.target, draft.record.join
    assert isinstance(state, Running) and target is not None
    newcomers = frozenset(target.devices) - set(state.plan.devices)
    if join is None and newcomers:
        _prepare(draft, newcomers)
    elif join is None:
        generation = draft.next_generation()
        draft.set(reserved=generation)
        _stop(draft, Join(generation=generation, plan=target, begun=True))
    elif join.begun and not join.stopping and join.done >= newcomers:
        _stop(draft, join)


def drop_join(draft: Draft) -> None:
    """Training goes on without the newcomers: end their processes."""
    join, state = draft.record.join, draft.state
    draft.set(join=None)
    if join is not None and isinstance(state, Running):
        for device in sorted(set(join.plan.devices) & set(draft.record.pids) - set(state.plan.devices)):
            draft.call(device.node, KillRank(device=device, why="training goes on without this newcomer"))


def newcomer_lost(draft: Draft, device: Device, why: str) -> None:
    """Its process is gone; its host may be well."""
    record, state = draft.record, draft.state
    # What was let go of in the join before may end only now, when its place in this one is being prepared.
    if record.join is None or device not in record.join.addresses or not isinstance(state, Running):
        return
    _failed(draft, f"newcomer {device} is lost ({why}); training goes on without it")


def give_up_joining(draft: Draft, why: str) -> None:
    _failed(draft, f"{why}; training goes on without newcomers")


def newcomer_reported(draft: Draft, report: RankReport) -> bool:
    """Whether it was one's: nobody of the generation that trains has left. It may be quicker than those who stop."""
    state, join = draft.state, draft.record.join
    if join is None or not isinstance(state, Running) or report.device not in join.addresses:
        return False
    if join.stopping:
        begin_reform(draft, resize(draft, draft.record.target), reports={report.device: report}, target=join.plan)
    return True


def stop_now(draft: Draft) -> None:
    """No step came to its end since the generation was told to stop."""
    join = draft.record.join
    assert join is not None
    begin_reform(draft, resize(draft, draft.record.target), target=join.plan)


# --- newcomers -----------------------------------------------------------------------------------------------------------


def _prepare(draft: Draft, newcomers: frozenset[Device]) -> None:
    target, generation = draft.record.target, draft.next_generation()
    assert target is not None
    idle = newcomers & set(draft.record.pids)
    draft.set(reserved=generation, join=Join(generation=generation, plan=target, idle=idle))
    by_node: dict[NodeId, list[Device]] = defaultdict(list)
    for device in sorted(newcomers):
        by_node[device.node].append(device)
    for node, devices in by_node.items():
        draft.call(node, PrepareSeats(generation=generation, devices=tuple(devices)))


def newcomers_prepared(draft: Draft, said: SeatsPrepared) -> None:
    join, state, record = draft.record.join, draft.state, draft.record
    if join is None or join.generation != said.generation or join.begun or not isinstance(state, Running):
        return
    # Where the process that was there has ended meanwhile, its successor holds nothing and nobody is to ask it.
    successors = {device for device, pid in said.pids.items() if record.pids.get(device) != pid}
    draft.set(pids={**record.pids, **said.pids}, listeners={**record.listeners, **said.addresses})
    join = replace(join, addresses={**join.addresses, **said.addresses}, idle=join.idle - successors)
    draft.set(join=join)
    newcomers = set(join.plan.devices) - set(state.plan.devices)
    if newcomers <= set(join.addresses):
        assert record.profile is not None
        planned = layout(join.plan, record.profile, mirrors=record.spec.recovery.mirrors)
        wanted = {device: planned.held(device) for device in sorted(newcomers)}
        if not _begin(draft, replace(join, begun=True, done=frozenset(d for d in wanted if not wanted[d])), wanted):
            give_up_joining(draft, "members do not hold what newcomers are to have")


def _begin(draft: Draft, join: Join, wanted: dict[Device, tuple[Interval, ...]]) -> bool:
    """Have `wanted` given by members other than those that broke off; False where they do not hold it all."""
    state, record = draft.state, draft.record
    assert isinstance(state, Running) and record.profile is not None
    held = layout(state.plan, record.profile, mirrors=record.spec.recovery.mirrors)
    sources = {d: held.held(d) for d in state.plan.devices if d not in join.broken}
    found = transfers(sources, Layout(owned=wanted, mirrored={}))
    if found.missing:
        return False
    draft.set(join=replace(join, moves=(*join.moves, *found.moves)))
    begin = BeginJoin(
        generation=join.generation,
        of=state.generation,
        plan=join.plan,
        moves=found.moves,
        addresses=join.addresses,
        attempt=join.attempt,
    )
    for node in sorted({device.node for move in found.moves for device in (move.source, move.target)}):
        draft.call(node, begin)
    if not join.attempt:
        copied = sum(len(move.interval) for move in found.moves)
        draft.say(
            "joining",
            f"{len(wanted)} newcomers receive {copied} elements while training goes on",
            elements=copied,
            newcomers=[str(device) for device in sorted(wanted)],
        )
    return True


def joiner_at(draft: Draft, said: JoinerAt) -> None:
    join = draft.record.join
    if join is not None and join.generation == said.generation and said.device not in join.done:
        draft.set(join=replace(join, done=join.done | {said.device}))
        draft.say("joined", f"{said.device} has everything as of step {said.step}")


def join_failed(draft: Draft, said: JoinFailed) -> None:
    """Another holder gives what the source was to give; with none left, the pause has to bring it."""
    join, state = draft.record.join, draft.state
    if join is None or join.generation != said.generation or join.stopping or not isinstance(state, Running):
        return
    broken = [move for move in join.moves if (move.source, move.target) == (said.source, said.device)]
    if not broken or said.device in join.done:
        return  # told again
    kept = tuple(move for move in join.moves if move not in broken)
    again = replace(join, moves=kept, attempt=join.attempt + 1, broken=join.broken | {said.source})
    if again.attempt <= MAX_ATTEMPTS and _begin(draft, again, {said.device: tuple(m.interval for m in broken)}):
        draft.say("source_replaced", f"{said.message}; {said.device} is given the same by others")
        return
    draft.set(join=replace(join, done=join.done | {said.device}))
    draft.say("copy_given_up", f"{said.message}; what {said.device} lacks is moved when training pauses")


def _failed(draft: Draft, why: str) -> None:
    failed = draft.record.joins_failed + 1
    draft.say("joining_given_up", why)
    draft.set(target=None, joins_failed=failed)
    if failed < MAX_JOINS:
        draft.set(considered=frozenset())  # plan again
    drop_join(draft)


def _stop(draft: Draft, join: Join) -> None:
    state = draft.state
    assert isinstance(state, Running)
    draft.set(join=replace(join, stopping=True), joins_failed=0)
    caught_up = "newcomers have caught up: " if set(join.plan.devices) - set(state.plan.devices) else ""
    draft.say("pausing", f"{caught_up}training pauses after the step under way")
    for node in state.plan.nodes:
        draft.call(node, StopAfter(generation=state.generation))


def resize(draft: Draft, target: Plan | None) -> Fault:
    """Why the generation ends: another plan is ready, or was when its ranks were told to stop."""
    state = draft.state
    assert isinstance(state, Running)
    if target is None:
        return Fault(cause=Cause.GROW, message="stopped for a plan that is there no longer", at=draft.now)
    change = draft.record.rebalance
    if change is not None and target == change.plan:
        return Fault(cause=Cause.BALANCE, message=change.why, at=draft.now)
    more = target.world_size - state.plan.world_size
    kind = "a larger" if more > 0 else "a smaller" if more < 0 else "another"
    cause = Cause.GROW if more > 0 else Cause.SHRINK
    return Fault(cause=cause, message=f"{kind} plan is ready: {target.describe()}", at=draft.now)
