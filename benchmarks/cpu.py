"""CPU time of processes, from the kernel's own account of them; it knows nothing of what they do. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from orchestrator.adapters.processes import ProcessId

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(processes: Iterable[ProcessId]) -> float:
    """User and system time used so far, all threads, not their children's; one that has ended counts nothing."""
    return sum(_ticks(process.pid) for process in processes) / _TICKS_PER_S


def _ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[11]) + int(fields[12])
