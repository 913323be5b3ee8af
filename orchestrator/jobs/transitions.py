"""Which state may follow which. The kernel checks every change of state against this table.

| from      | may become                                              |
|-----------|---------------------------------------------------------|
| Probing   | Queued, Stopping or terminal                            |
| Queued    | Queued (another reason), Starting, Paused, Stopping or terminal |
| Starting  | Starting, Running, Reforming, Queued, Stopping          |
| Running   | Running, Reforming, Stopping                            |
| Reforming | Reforming, Running, Queued, Stopping                    |
| Stopping  | Stopping, Paused, terminal                              |
| Paused    | Queued, Stopping or terminal                            |
| terminal  | nothing                                                 |
"""

from __future__ import annotations

from orchestrator.domain.state import (
    Cancelled,
    Failed,
    JobState,
    Paused,
    Probing,
    Queued,
    Reforming,
    Running,
    Starting,
    Stopping,
    Succeeded,
)

_OVER = frozenset({Succeeded, Failed, Cancelled})

ALLOWED: dict[type[JobState], frozenset[type[JobState]]] = {
    Probing: frozenset({Queued, Stopping}) | _OVER,
    Queued: frozenset({Queued, Starting, Paused, Stopping}) | _OVER,
    Starting: frozenset({Starting, Running, Reforming, Queued, Stopping}),
    Running: frozenset({Running, Reforming, Stopping}),
    Reforming: frozenset({Reforming, Running, Queued, Stopping}),
    Stopping: frozenset({Stopping, Paused}) | _OVER,
    Paused: frozenset({Queued, Stopping}) | _OVER,
    Succeeded: frozenset(),
    Failed: frozenset(),
    Cancelled: frozenset(),
}


class IllegalTransition(AssertionError):
    """A bug in the kernel: the table forbids this change."""


def check(before: JobState, after: JobState) -> JobState:
    """`after`, if the table allows it. Raises IllegalTransition."""
    if type(after) not in ALLOWED[type(before)]:
        raise IllegalTransition(f"{type(before).__name__} may not become {type(after).__name__}")
    return after
