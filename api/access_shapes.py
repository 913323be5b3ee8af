"""What is asked and answered about tokens, sessions and the audit log. Shared by the routes and the SDK."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from orchestrator.domain.access import Role

from .schemas import Name, Request
from .views import Instant, View

DAY_S = 86400


class TokenRequest(Request):
    """A token to be made."""

    name: Name
    """Whose or what for; shown wherever it is named."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=4)] = (Role.OPERATOR,)
    projects: Annotated[tuple[Name, ...], Field(max_length=100)] = ()
    """Whose jobs alone exist for it; none: those of all."""
    expires_s: Annotated[float, Field(gt=0, le=3650 * DAY_S)] | None = 90 * DAY_S
    """From now; null: never."""


class SignInRequest(Request):
    """One of the two: a token, or the code of a login link."""

    token: Annotated[str, Field(max_length=200)] | None = None
    code: Annotated[str, Field(max_length=200)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> SignInRequest:
        if (self.token is None) == (self.code is None):
            raise ValueError("send a token or a code, and not both")
        return self


class WhoView(View):
    """Who asks, as the server sees it."""

    id: str
    name: str
    roles: tuple[Role, ...]
    projects: tuple[str, ...]
    expires_at: Instant | None
    is_session: bool = False
    """Signed in by a browser's cookie."""


class TokenView(View):
    id: str
    name: str
    roles: tuple[Role, ...]
    projects: tuple[str, ...]
    created_at: Instant
    created_by: str
    expires_at: Instant | None
    revoked_at: Instant | None
    last_used_at: Instant | None
    """To about a minute."""
    is_valid: bool


class MintedView(TokenView):
    """The only answer that ever holds a token's text."""

    token: str


class CodeView(View):
    """Lets a browser sign in once. path: of the page that does it; the part after # never leaves the browser."""

    path: str
    expires_at: Instant


class AuditView(View):
    """Who asked for what, when, from where, and the HTTP status it was answered with."""

    id: str
    at: Instant
    principal: str
    name: str
    source: str
    method: str
    operation: str
    path: str
    status: int
    request_id: str


class AuditPage(View):
    entries: tuple[AuditView, ...]
    next_cursor: str | None
