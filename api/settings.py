"""What the API is told by its composition root. Constructing this reads no environment and touches no disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    state_dir: Path
    """Holds jobs/<job>/logs/<node>-<index>.log, which this API reads and never writes."""
    chaos: bool = False
    """Whether POST /api/v1/faults may kill ranks and nodes."""
    version: str = "0"
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
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

    def log_dir(self, job: str) -> Path:
        return self.state_dir / "jobs" / job / "logs"
