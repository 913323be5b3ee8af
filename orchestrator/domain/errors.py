"""What may be refused, and how it is said: fact, limit, remedy, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass


class EverstepError(Exception):
    """Root of everything this project raises on purpose."""


class StaleTerm(EverstepError):
    """A supervisor that has been replaced tried to write."""


class WentBack(StaleTerm):
    """The store has forgotten what it had confirmed: it was restored from an older copy, or a replica took over."""


class StaleGeneration(EverstepError):
    """A message or checkpoint of a closed generation arrived at a writer."""


class NotFound(EverstepError):
    """The named job or node does not exist."""


class Conflict(EverstepError):
    """The request contradicts what is recorded (a reused key with another body, a terminal job)."""


class Outdated(EverstepError):
    """What was asked for rests on a look at something that has changed since."""


class Unavailable(EverstepError):
    """A part of the control plane cannot be reached or is not safe to write to now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One thing wrong with one field of a request."""

    field: str
    value: object
    message: str
    allowed: str | None = None


class Refused(EverstepError):
    """A request or program that cannot work, refused before anything is held."""

    def __init__(self, message: str, problems: tuple[FieldProblem, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.problems = problems
