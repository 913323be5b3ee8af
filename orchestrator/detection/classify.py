"""From what was seen to a fault with its evidence in words."""

from __future__ import annotations

import signal

from orchestrator.domain.ids import NodeId
from orchestrator.domain.job import Cause, Fault
from orchestrator.domain.protocol import RankExited


def exit_fault(exited: RankExited, now: float) -> Fault:
    """A rank's process ended and its host saw it."""
    return Fault(
        cause=Cause.RANK_LOST,
        message=f"the rank on {exited.device} (pid {exited.pid}) {_how(exited)}",
        at=now - exited.seconds_ago,
        devices=(exited.device,),
    )


def host_fault(node: NodeId, message: str, now: float) -> Fault:
    return Fault(cause=Cause.NODE_LOST, message=f"the host on {node} is gone: {message}", at=now)


def _how(exited: RankExited) -> str:
    code = exited.exit_code
    if exited.fault_point:
        return f"was killed at fault point {exited.fault_point}"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
