"""A job ends or is put aside: the outcome is decided first, then every host is closed, then it becomes the state."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.ids import NodeId, Step
from orchestrator.domain.requests import CloseHost
from orchestrator.domain.state import PLANNING, Cancelled, Failed, Outcome, Paused, Queued, Stopping, Succeeded

from .draft import Draft


def stop(draft: Draft, outcome: Outcome) -> None:
    """Close every host and keep `outcome` until they are closed; a second outcome changes nothing, but for a pause."""
    state = draft.state
    if isinstance(state, Stopping) and isinstance(state.outcome, Paused):
        draft.become(replace(state, outcome=outcome))
        draft.set(pause=None)
        return
    if draft.is_over or isinstance(state, Stopping):
        return
    hosts = draft.record.hosts
    # What was asked for and not done yet is moot; the closing below is what counts.
    draft.set(outbox={}, target=None, join=None, planning=False, looking=None)
    draft.effects.clear()
    draft.ward.forget_tester(draft.record.id)
    draft.become(Stopping(outcome=outcome, open_hosts=hosts))
    if not hosts:
        _end(draft, outcome)
        return
    draft.say("stopping", f"stopping to end as {_word(outcome)}")
    for node in sorted(hosts):
        draft.call(node, CloseHost())


def host_closed(draft: Draft, node: NodeId) -> None:
    draft.forget_host(node)
    draft.set(avoided=draft.record.avoided - {node})
    state = draft.state
    if isinstance(state, Stopping):
        left = state.open_hosts - {node}
        draft.become(replace(state, open_hosts=left))
        if not left:
            _end(draft, state.outcome)


def abandon_hosts(draft: Draft) -> None:
    """Some hosts did not answer in time; their own isolation rule ends their ranks."""
    state = draft.state
    assert isinstance(state, Stopping)
    draft.say("hosts_abandoned", f"{', '.join(sorted(state.open_hosts))} did not confirm the close")
    _end(draft, state.outcome)


def _end(draft: Draft, outcome: Outcome) -> None:
    draft.become(outcome)
    nobody: frozenset[NodeId] = frozenset()
    draft.set(hosts=nobody, warm=nobody, unreachable=nobody, avoided=nobody, considered=frozenset())
    draft.set(pids={}, listeners={}, outbox={}, plans={}, saving={}, copies={}, spares={}, at_risk="")
    draft.effects.clear()
    word = _word(outcome)
    if isinstance(outcome, Paused):
        wish = draft.record.pause
        is_preempted = wish is not None and bool(wish.preempted)
        resumes = wish is not None and (wish.resumes or is_preempted)
        if is_preempted:  # its owner wanted no pause: it stands in the queue
            draft.set(paused_since=None)
            draft.turn(is_preempted=True, queued_since=draft.now)
        # Devices are measured anew when it goes on, perhaps others.
        draft.set(stragglers={}, rebalance=None, is_rebalanced=False)
        draft.set(pause=None, save_asked=None, save_rests=False, save_failures=0, unsaved=(), last_step_at=None)
        put = "put aside" if is_preempted else "paused"
        step, saved = draft.record.committed, draft.record.checkpoint.step if draft.record.checkpoint else Step(0)
        kept = "which is saved" if saved >= step else f"what is saved is step {saved}"
        draft.say("paused", f"{put} at step {step}, {kept}")
        if resumes:
            draft.become(Queued(reason=PLANNING))
    elif isinstance(outcome, Failed):
        where = f" (rank on {outcome.device}, exit code {outcome.exit_code})" if outcome.device else ""
        draft.say("ended", f"{word}{where}: {outcome.message}", log_tail=list(outcome.log_tail))
    else:
        # Where that is carried out now, who asked is said of everything that comes of it.
        by = f" by {outcome.by}" if isinstance(outcome, Cancelled) and outcome.by and not draft.actor else ""
        draft.say("ended", f"{word}{by} at step {draft.record.committed}")


def _word(outcome: Outcome) -> str:
    match outcome:
        case Succeeded():
            return "SUCCEEDED"
        case Failed():
            return "FAILED"
        case Cancelled():
            return "CANCELLED"
        case Paused():
            return "PAUSED"
