"""Named instants of a step and of a restore at which a rank can be made to fail, on purpose.

It owns the hook that is asked there and nothing else: what happens is `faults`' business. Off, a point costs one look at a
global.
"""

from __future__ import annotations

from collections.abc import Callable

Hook = Callable[[str], None]

_hook: Hook | None = None


def faultpoint(name: str) -> None:
    """name: one of orchestrator.domain.faults.POINTS. Whatever an armed fault does, it does here, in this thread."""
    if _hook is not None:
        _hook(name)


def arm(hook: Hook) -> None:
    """Have `hook` called at every point from now on. Any thread."""
    global _hook
    _hook = hook


def disarm() -> None:
    global _hook
    _hook = None
