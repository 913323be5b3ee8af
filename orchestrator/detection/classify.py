"""From what was seen to a fault with its evidence in words."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.host_events import HostFailed, RankExited
from orchestrator.domain.ids import Device, NodeId

CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that a process brings upon itself; any other one was sent to it."""
INJECTED = "InjectedError"
"""What a rank raises because a fault was asked for."""
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+")


def ending_fault(device: Device, now: float) -> Fault:
    """A rank's end has begun; until its host knows how, it is felt like a connection that broke."""
    return Fault(
        cause=Cause.LINK_LOST, message=f"the rank on {device} is ending", at=now, devices=(device,), is_external=True
    )


def exit_fault(exited: RankExited, now: float) -> Fault:
    """A rank's process ended and its host saw it."""
    error = _own_error(exited)
    how = exited.message if exited.user_error and exited.message else _how(exited)
    return Fault(
        cause=Cause.RANK_LOST,
        message=f"the rank on {exited.device} (pid {exited.pid}) {'raised ' if exited.user_error else ''}{how}",
        at=now - exited.seconds_ago,
        devices=(exited.device,),
        signature=signature(error),
        is_external=not error,
    )


def host_fault(node: NodeId, message: str, now: float, cause: Cause = Cause.NODE_LOST) -> Fault:
    """The host went away, or was given up."""
    return Fault(cause=cause, message=f"the host on {node} is gone: {message}", at=now, is_external=True, node=node)


def host_failure(node: NodeId, failed: HostFailed, now: float) -> Fault:
    """The host lives and cannot serve: the machinery's own error, unless somebody killed its zygote."""
    fault = host_fault(node, failed.message, now)
    if failed.exit_code < 0 and -failed.exit_code not in CRASHES:
        return fault
    return replace(fault, signature=signature(failed.message), is_external=False)


def signature(error: str) -> str:
    """An error in words without the numbers and addresses that differ from one time to the next."""
    return _VARIES.sub("#", error)[:300]


def _own_error(exited: RankExited) -> str:
    """What the rank did to itself, in words; empty where it was done to it."""
    if exited.user_error:
        return "" if exited.message.startswith(INJECTED) else exited.message or f"exit code {exited.exit_code}"
    if exited.exit_code >= 0:
        last = next((line for line in reversed(exited.log_tail) if line.strip()), "")
        return f"exit code {exited.exit_code} {last}".strip()
    return _how(exited) if -exited.exit_code in CRASHES else ""


def _how(exited: RankExited) -> str:
    code = exited.exit_code
    if exited.fault_point:
        return f"was killed at fault point {exited.fault_point}"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # Whoever killed it on purpose has said why; its host alone knows of the signal.
    why = f": {exited.message}" if exited.message and name not in exited.message else ""
    return f"was killed by {name}{why}"
