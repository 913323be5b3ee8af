"""Who speaks to the control plane, what each role may do, and the record of what was done.

Pure values: it refuses to know how a token looks, where it is kept and which route needs what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    VIEWER = "viewer"
    """Reads."""
    OPERATOR = "operator"
    """Submits and controls jobs and nodes."""
    ADMIN = "admin"
    """Gives out and revokes tokens, keeps secrets, reads the audit log."""
    CHAOS = "chaos"
    """Causes faults on purpose. No other role includes it."""


INCLUDES: Mapping[Role, frozenset[Role]] = {
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.OPERATOR: frozenset({Role.VIEWER, Role.OPERATOR}),
    Role.ADMIN: frozenset({Role.VIEWER, Role.OPERATOR, Role.ADMIN}),
    Role.CHAOS: frozenset({Role.VIEWER, Role.CHAOS}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks. projects: whose jobs alone exist for it; none: those of all."""

    id: str
    name: str
    roles: tuple[Role, ...]
    projects: tuple[str, ...] = ()
    expires_at: float | None = None

    def may(self, role: Role) -> bool:
        return any(role in INCLUDES[own] for own in self.roles)

    @property
    def submitter(self) -> Submitter:
        return Submitter(id=self.id, name=self.name)

    def reaches(self, project: str) -> bool:
        return not self.projects or project in self.projects

    def covers(self, roles: tuple[Role, ...], projects: tuple[str, ...]) -> bool:
        """Whether it has all of that itself, so that what it gives out is no more than it holds."""
        return all(self.may(role) for role in roles) and (
            not self.projects or (bool(projects) and set(projects) <= set(self.projects))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """Whose token a job was submitted with: what finds it again, whatever becomes of the token."""

    id: str
    name: str

    def is_called(self, asked: str) -> bool:
        """Names are people's words and may be shared; an id is one token's."""
        return asked in (self.id, self.name)


LOCAL = Principal(id="local", name="local admin", roles=(Role.ADMIN, Role.CHAOS))
"""Who reads the state folder's own token file, which is to be the cluster's owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as it is kept: its hash, never its text. Instants are seconds since the epoch."""

    id: str
    name: str
    digest: str
    roles: tuple[Role, ...]
    projects: tuple[str, ...] = ()
    created_at: float
    created_by: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    @property
    def principal(self) -> Principal:
        return Principal(id=self.id, name=self.name, roles=self.roles, projects=self.projects, expires_at=self.expires_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One thing that somebody asked to have changed. status: the HTTP status it was answered with."""

    at: float
    principal: str
    name: str
    source: str
    method: str
    operation: str
    path: str
    status: int
    request_id: str
