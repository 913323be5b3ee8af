"""What can go wrong between a caller and the API: it said no, nobody answered, or it takes longer than the caller waits.

ClientError
├── ApiError       the API answered with a problem
├── Unreachable    nobody answered within the retry budget
└── StillRunning   a wait ran out before the job did
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClientError(Exception):
    """Root of what this SDK raises."""


class ApiError(ClientError):
    """The API's refusal. problem: the whole RFC 9457 object."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(str(problem.get("detail") or problem.get("title") or "the server answered with an error"))
        self.problem = dict(problem)

    @property
    def status(self) -> int:
        return int(self.problem.get("status", 0))

    @property
    def detail(self) -> str:
        return str(self)

    @property
    def kind(self) -> str:
        """The last part of the problem's type: `invalid`, `not-found`, `conflict`, `key-reused`, ..."""
        return str(self.problem.get("type", "")).rpartition(":")[2]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Each with field, value, message and often allowed."""
        return list(self.problem.get("errors", ()))


class Unreachable(ClientError):
    """Nobody answered at the address."""


class StillRunning(ClientError):
    """The job had not ended when the caller's time was up."""
