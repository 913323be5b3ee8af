"""What the API is told by its composition root. Constructing this reads no environment and touches no disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.domain.kinds import DeviceKind

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    state_dir: Path
    """Holds jobs/<job>/logs/<node>-<index>.log, which this API reads and never writes."""
    chaos: bool = False
    """Whether POST /api/v1/faults may kill ranks and nodes."""
    version: str = "0"
    allowed_hosts: tuple[str, ...] = LOOPBACK
    """Names that may stand in a request's Host and Origin headers, with any port."""
    max_body_bytes: int = 1 << 20
    max_log_bytes: int = 1 << 20
    """Of one answer of /logs."""
    ping_s: float = 15.0
    """An event stream with nothing to say sends a comment this often."""
    idle_check_s: float = 1.0
    """A quiet event stream looks this often whether its job has ended."""
    max_metric_jobs: int = 50
    """Newest jobs that get series of their own in /metrics."""
    health_timeout_s: float = 3.0
    requests_per_s: float = 1000.0
    """Of one token, in the long run,"""
    burst: float = 5000.0
    """and at once."""
    max_open_requests: int = 2000
    """Of one token at a time, event streams included."""
    mistakes_per_s: float = 0.5
    """Wrong tokens from one address, in the long run,"""
    mistakes_burst: float = 30.0
    """and at once; beyond it only who is known there is answered."""
    kinds: tuple[DeviceKind, ...] = ()
    """Of device, that the configuration adds or describes otherwise."""
    refusals_per_s: float = 1.0
    """Of one token's changes that were refused, so many are kept in the audit log in the long run,"""
    refusals_burst: float = 200.0
    """and at once: what was done is all kept, what was not pushes no more than this of it out."""
    local_digest: str = ""
    """Hash of the state folder's own token; "": there is none."""

    def log_dir(self, job: str) -> Path:
        return self.state_dir / "jobs" / job / "logs"
