"""Standard output of a job's processes with its secrets covered: what a program prints, and tracebacks.

What a library writes past Python's own streams goes into the log as it is; who reads a log through the API is shown none of
that either.
"""

from __future__ import annotations

import io
import sys

from orchestrator.domain.secrecy import Veil


class _Covered(io.TextIOWrapper):
    veil: Veil

    def write(self, text: str) -> int:
        super().write(self.veil.over_text(text))
        return len(text)


def cover_output(veil: Veil) -> None:
    """Of this process and of those it forks. Nothing changes where there is nothing to hide."""
    if not veil:
        return
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        covered = _Covered(stream.detach(), "utf-8", "backslashreplace", line_buffering=True)
        covered.veil = veil
        setattr(sys, name, covered)
        setattr(sys, f"__{name}__", covered)
