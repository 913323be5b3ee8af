"""Calls about tokens, sessions and the audit log, as values; see calls.py."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from api.access_shapes import AuditPage, CodeView, MintedView, TokenView, WhoView

from .calls import Call, many, one


def whoami() -> Call[WhoView]:
    return Call(method="GET", path="/api/v1/whoami", read=one(WhoView))


def create_token(name: str, roles: Sequence[str], projects: Sequence[str], expires_s: float | None) -> Call[MintedView]:
    body = {"name": name, "roles": list(roles), "projects": list(projects), "expires_s": expires_s}
    return Call(method="POST", path="/api/v1/tokens", body=body, is_repeatable=False, read=one(MintedView))


def tokens() -> Call[list[TokenView]]:
    return Call(method="GET", path="/api/v1/tokens", read=many(TokenView))


def revoke_token(token: str) -> Call[TokenView]:
    return Call(method="DELETE", path=f"/api/v1/tokens/{quote(token, safe='')}", read=one(TokenView))


def login_code() -> Call[CodeView]:
    return Call(method="POST", path="/api/v1/session/codes", is_repeatable=False, read=one(CodeView))


def audit(limit: int, cursor: str | None) -> Call[AuditPage]:
    params = {"limit": limit} | ({"cursor": cursor} if cursor else {})
    return Call(method="GET", path="/api/v1/audit", params=params, read=one(AuditPage))
