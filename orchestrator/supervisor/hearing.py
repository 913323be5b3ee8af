"""What a job is told of its hosts and deadlines, and who takes it from there.

Late and repeated news is sorted out here: an earlier process's end, a host that was given up, a silence without evidence.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import assert_never

from orchestrator.detection.classify import ending_fault, exit_fault, host_failure, host_fault
from orchestrator.domain.events import Contact, HostLost, HostSaid
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.host_events import (
    CopiesSeen,
    FaultCarriedOut,
    HostFailed,
    HostOpened,
    JoinerAt,
    JoinFailed,
    RankEnding,
    RankExited,
    RankFinished,
    RankReady,
    RankReported,
    RanksSeen,
    RanksStalled,
    SeatsPrepared,
    SelfTested,
    ShardNotSaved,
    ShardSaved,
    StepsPassed,
)
from orchestrator.domain.ids import NodeId
from orchestrator.domain.state import Failed, Reforming, Running, Starting, Stopping

from .asked import asked_came_to_nothing, save_again
from .balancing import paces_seen
from .believing import void_where_canary_failed
from .copying import copies_seen
from .deadlines import deadlines
from .draft import Draft
from .faulting import fault_carried_out, fault_seen
from .forming import end_rest, host_opened, rank_ready, seats_prepared
from .joining import (
    give_up_joining,
    join_failed,
    joiner_at,
    newcomer_lost,
    newcomers_prepared,
    stop_now,
)
from .keeping import shard_not_saved, shard_saved
from .losing import end_explained, host_lost, rank_exited
from .pausing import rank_rests, rest_came_to_nothing
from .reforming import begin_reform
from .reporting import ask_for_patience, dispensable_suspects, give_up_silent, give_up_waiting, rank_reported
from .sparing import give_up_slow_spares, spare_exited, spare_prepared
from .stalling import conclude, host_answers, host_silent, ranks_seen, ranks_stalled, unbar
from .stopping import abandon_hosts, host_closed, stop
from .testing import self_tested
from .training import final_state_evaluated, steps_passed


def host_said(draft: Draft, said: HostSaid) -> None:
    node = said.node
    contact_restored(draft, node)
    if node not in draft.record.hosts or node in draft.record.avoided:
        return  # it was given up
    match said.event:
        case HostOpened():
            host_opened(draft, node)
        case SeatsPrepared():
            if not spare_prepared(draft, node, said.event):
                seats_prepared(draft, said.event)
                newcomers_prepared(draft, said.event)
        case RankReported(report=report):
            rank_reported(draft, report)
            _give_up_suspects(draft)
        case RankEnding():
            _rank_ending(draft, said.event)
        case RankExited():
            _rank_exited(draft, said.event)
        case RankReady(device=device, generation=generation, phases=phases, notes=notes):
            rank_ready(draft, device, generation, dict(phases))
            for note in notes:
                draft.say("checkpoint_damaged", f"{device} reads it elsewhere: {note}")
        case StepsPassed():
            steps_passed(draft, said.event)
            paces_seen(draft, said.event)
            _look_at_canary(draft)
        case ShardSaved():
            shard_saved(draft, said.event)
        case ShardNotSaved():
            shard_not_saved(draft, said.event)
            asked_came_to_nothing(draft, said.event.step, said.event.message)
            rest_came_to_nothing(draft, said.event.step, said.event.message)
        case CopiesSeen(copies=copies):
            copies_seen(draft, node, copies)
        case JoinerAt():
            joiner_at(draft, said.event)
        case JoinFailed():
            join_failed(draft, said.event)
        case RankFinished():
            rank_rests(draft, said.event)
            final_state_evaluated(draft, said.event)  # with the last step's commit it ends a job: training.finish_if_done
        case RanksStalled():
            ranks_stalled(draft, node, said.event)
        case RanksSeen():
            ranks_seen(draft, node, said.event)
        case SelfTested():
            self_tested(draft, said.event)
        case FaultCarriedOut():
            fault_carried_out(draft, said.event)
        case HostFailed(message=message, log_tail=tail):
            fault = host_failure(node, said.event, draft.now)
            # What somebody did to a host that starts is not the program's doing: then another node is tried. Nor is it
            # where the job has trained: it was paused, and its checkpoint waits for a host that starts.
            if isinstance(draft.state, Starting) and _has_done_nothing(draft) and not fault.is_external:
                stop(draft, Failed(at=draft.now, message=f"the host on {node} failed: {message}", log_tail=tail))
            else:
                _host_seen_lost(draft, node, fault, False)
        case _:
            assert_never(said.event)


def _has_done_nothing(draft: Draft) -> bool:
    return draft.record.started_at is None and not draft.record.incidents


def _look_at_canary(draft: Draft) -> None:
    """A first step that differs ends its generation; one that closes already is settled with that."""
    state, canary = draft.state, draft.record.canary
    if isinstance(state, Running) and canary is not None and canary.failed:
        message = f"restored from the checkpoint of step {canary.checkpoint.step}, and {canary.failed}"
        if void_where_canary_failed(draft, state.generation):
            begin_reform(draft, Fault(cause=Cause.CHECKPOINT, message=message, at=draft.now, is_external=True))


def contact_restored(draft: Draft, node: NodeId) -> None:
    if node in draft.record.unreachable:
        draft.set(unreachable=draft.record.unreachable - {node})
        draft.say("contact_restored", f"{node} answers again")
        host_answers(draft)


def _rank_ending(draft: Draft, ending: RankEnding) -> None:
    """Everything that a rank's end leads to begins; how it ended is told by the one event that may still explain it."""
    device = ending.device
    if draft.record.pids.get(device) != ending.pid:
        return
    draft.set(ending={**draft.record.ending, device: ending.pid})
    exited = RankExited(device=device, pid=ending.pid, exit_code=-signal.SIGKILL, report=ending.report)
    if not spare_exited(draft, exited):
        rank_exited(draft, exited, ending_fault(device, draft.now))
        newcomer_lost(draft, device, "its process has ended")


def _rank_exited(draft: Draft, exited: RankExited) -> None:
    if draft.record.ending.get(exited.device) == exited.pid:
        draft.set(ending={d: pid for d, pid in draft.record.ending.items() if d != exited.device})
        _end_explained(draft, exited)
        return
    if draft.record.pids.get(exited.device) != exited.pid:
        return  # an earlier process on that device
    if spare_exited(draft, exited):
        return
    if exited.stack and draft.incident and exited.device in draft.incident.fault.devices:
        draft.update_incident(stack=exited.stack)
    fault = exit_fault(exited, draft.now)
    rank_exited(draft, exited, fault)
    newcomer_lost(draft, exited.device, exited.message or f"exit code {exited.exit_code}")
    fault_seen(draft, fault, fault.devices)


def _end_explained(draft: Draft, exited: RankExited) -> None:
    if exited.stack and draft.incident and exited.device in draft.incident.fault.devices:
        draft.update_incident(stack=exited.stack)
    fault = exit_fault(exited, draft.now)
    end_explained(draft, exited, fault)
    fault_seen(draft, fault, fault.devices)


def host_unheard(draft: Draft, lost: HostLost) -> None:
    """Unreachable is not failed: without evidence a running generation is left alone."""
    if lost.node not in draft.record.hosts:
        return
    is_gone = lost.contact is Contact.GONE
    if isinstance(draft.state, Stopping):
        if is_gone:
            host_closed(draft, lost.node)
        return
    if lost.node in draft.record.avoided:  # it is being closed
        if is_gone:
            host_closed(draft, lost.node)
        return
    if is_gone:
        _host_seen_lost(draft, lost.node, host_fault(lost.node, lost.message, draft.now), True)
    elif lost.node not in draft.record.unreachable:
        draft.set(unreachable=draft.record.unreachable | {lost.node})
        draft.say("contact_lost", f"{lost.node} does not answer ({lost.message}); training goes on while steps commit")
        host_silent(draft, lost.node)
        _give_up_suspects(draft)


def _give_up_suspects(draft: Draft) -> None:
    for node in sorted(dispensable_suspects(draft)):
        fault = host_fault(node, "silent, and connections to its ranks broke", draft.now)
        _host_seen_lost(draft, node, fault, False)


def _host_seen_lost(draft: Draft, node: NodeId, fault: Fault, is_gone: bool) -> None:
    had = [device for device in {**draft.record.pids, **draft.record.ending} if device.node == node]
    host_lost(draft, node, fault, is_gone)
    fault_seen(draft, fault, had)


def deadline_passed(draft: Draft, key: str) -> None:
    if key not in deadlines(draft.record):
        return
    match key.split(":")[0]:
        case "probe":
            stop(draft, Failed(at=draft.now, message="the program could not be described in time; see its imports"))
        case "look":
            conclude(draft)
        case "stop":
            abandon_hosts(draft)
        case "settle":
            ask_for_patience(draft)
        case "patience" | "isolated":
            give_up_waiting(draft)
        case "grow":
            _give_up_growing(draft)
        case "spare":
            give_up_slow_spares(draft)
        case "join_prepare":
            give_up_joining(draft, "newcomers did not become ready in time")
        case "join_copy":
            give_up_joining(draft, "newcomers did not catch up in time")
        case "join_stop":
            stop_now(draft)
        case "join_again":
            draft.set(considered=frozenset())
        case "retry":
            draft.set(avoided=draft.record.avoided & draft.record.hosts)
        case "open" | "prepare":
            _give_up_on_slow_hosts(draft)
        case "silent":
            give_up_silent(draft)
        case "rest":
            end_rest(draft)
        case "save_again":
            save_again(draft)
        case "unsaved":
            draft.turn(unsaved_until=0.0)
        case "stuck":
            assert isinstance(draft.state, Reforming)
            draft.become(replace(draft.state, is_stuck=True))
        case "bar":
            unbar(draft, key)
        case "form":
            begin_reform(draft, _not_ready(draft))


def _not_ready(draft: Draft) -> Fault:
    state = draft.state
    assert isinstance(state, Starting | Reforming) and state.forming is not None
    silent = sorted(draft.record.unreachable & set(state.forming.plan.nodes))
    if silent:
        message = f"the generation did not become ready in time, and {', '.join(silent)} cannot be reached"
        return Fault(cause=Cause.CONTACT_LOST, message=message, at=draft.now, is_external=True)
    return Fault(cause=Cause.HANG, message="the generation did not become ready in time", at=draft.now)


def _give_up_on_slow_hosts(draft: Draft) -> None:
    state = draft.state
    assert isinstance(state, Starting | Reforming)
    if state.forming is None:
        return
    slow = {d.node for d in state.forming.plan.devices if d not in state.forming.addresses}
    if isinstance(state, Starting) and draft.record.started_at is None and slow == set(state.forming.plan.nodes):
        stop(draft, Failed(at=draft.now, message=f"{', '.join(sorted(slow))} did not become ready in time"))
        return
    for node in sorted(slow):
        host_lost(draft, node, host_fault(node, "it did not become ready in time", draft.now), False)


def _give_up_growing(draft: Draft) -> None:
    """The hosts of another plan do not become warm: train on without them."""
    target = draft.record.target
    assert target is not None
    slow = sorted(set(target.nodes) - draft.record.warm)
    draft.say(
        "growing_given_up", f"the next plan is not ready in time (cold: {', '.join(slow) or 'none'}); training goes on"
    )
    draft.set(target=None, considered=frozenset())
    for node in slow:
        host_lost(draft, node, host_fault(node, "it did not become ready in time", draft.now), False)
