"""Who asks, signing in and out, tokens, and the record of what was asked for."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from orchestrator.domain.access import Principal, Token
from orchestrator.ports import Keyring

from .. import access_shapes as shapes
from ..access import ThePrincipal
from ..deps import body_of, document
from ..doorman import CHALLENGE, cookie_name
from ..identities import CODE_S, SESSION_S, Identities
from ..problems import Problem
from ..tokens import digest, mint

router = APIRouter(prefix="/api/v1", tags=["access"])
TokenBody = Annotated[shapes.TokenRequest, Depends(body_of(shapes.TokenRequest))]
SignInBody = Annotated[shapes.SignInRequest, Depends(body_of(shapes.SignInRequest))]


def get_keyring(request: Request) -> Keyring:
    found: Keyring | None = request.app.state.keyring
    if found is None:
        raise Problem(409, "auth-off", "this server was started without auth, so it has no tokens; start it with auth")
    return found


def get_identities(request: Request) -> Identities:
    get_keyring(request)
    found: Identities = request.app.state.identities
    return found


TheKeyring = Annotated[Keyring, Depends(get_keyring)]
TheIdentities = Annotated[Identities, Depends(get_identities)]


@router.get("/whoami")
async def whoami(request: Request, principal: ThePrincipal) -> shapes.WhoView:
    """Whose token or session this is, and what it may do."""
    return _who(
        principal, is_session="authorization" not in request.headers and cookie_name(request.scope) in request.cookies
    )


@router.post("/session", openapi_extra=document(shapes.SignInRequest))
async def sign_in(request: Request, response: Response, known: TheIdentities, wanted: SignInBody) -> shapes.WhoView:
    """Exchange a token, or the code of a login link, for a cookie that this browser's pages ask with."""
    found = await (known.of_token(wanted.token.strip()) if wanted.token is not None else known.of_code(wanted.code or ""))
    if found is None:
        what = "token is not known here" if wanted.token is not None else "link was used already"
        again = "paste another one" if wanted.token is not None else "get a new one with everstep login"
        raise Problem(401, "unauthenticated", f"this {what}, was revoked or has run out; {again}", headers=CHALLENGE)
    request.state.principal = found
    response.set_cookie(
        cookie_name(request.scope),
        await known.open_session(found),
        max_age=SESSION_S,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    response.headers["Cache-Control"] = "no-store"
    return _who(found, is_session=True)


@router.delete("/session", status_code=204)
async def sign_out(request: Request, known: TheIdentities, principal: ThePrincipal) -> Response:
    """End this browser's session."""
    name = cookie_name(request.scope)
    if (session := request.cookies.get(name)) is not None:
        await known.end_session(session)
    response = Response(status_code=204)
    response.delete_cookie(name, path="/", httponly=True, samesite="strict")
    return response


@router.post("/session/codes", status_code=201)
async def make_login_code(known: TheIdentities, principal: ThePrincipal) -> shapes.CodeView:
    """A login link for a browser: good once, for ten minutes, with the rights of whoever asks for it."""
    code = await known.make_code(principal)
    return shapes.CodeView(path=f"/#login={code}", expires_at=_instant(time.time() + CODE_S))


@router.post("/tokens", status_code=201, openapi_extra=document(shapes.TokenRequest))
async def create_token(
    response: Response, keyring: TheKeyring, principal: ThePrincipal, wanted: TokenBody
) -> shapes.MintedView:
    """Make a token. Its text is in this answer and nowhere else: what is kept is a hash."""
    if not principal.covers(wanted.roles, wanted.projects):
        detail = "a token can be given no role that this one has not itself; leave out what it lacks (see whoami)"
        raise Problem(403, "forbidden", detail)
    text, now = mint(), time.time()
    token = Token(
        id=f"tok-{secrets.token_hex(6)}",
        name=wanted.name,
        digest=digest(text),
        roles=wanted.roles,
        projects=wanted.projects,
        created_at=now,
        created_by=principal.name,
        expires_at=None if wanted.expires_s is None else now + wanted.expires_s,
    )
    await keyring.add_token(token)
    response.headers["Cache-Control"] = "no-store"
    return shapes.MintedView(token=text, **dict(_shown(token, None)))


@router.get("/tokens")
async def list_tokens(keyring: TheKeyring) -> list[shapes.TokenView]:
    """Oldest first, without their text; those revoked or run out within the last 30 days are among them."""
    return [_shown(token, used) for token, used in await keyring.tokens()]


@router.delete("/tokens/{token_id}")
async def revoke_token(keyring: TheKeyring, known: TheIdentities, token_id: str) -> shapes.TokenView:
    """Have it refused from now on (within a second), with every session that was opened with it."""
    revoked = await keyring.revoke(token_id[:100], time.time())
    known.forget()
    return _shown(revoked, None)


@router.get("/audit")
async def audit_log(
    keyring: TheKeyring,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(min_length=1, max_length=40)] = None,
) -> shapes.AuditPage:
    """Every request that was to change something, newest first; the newest hundred thousand are kept."""
    found = await keyring.audit(limit, cursor)
    entries = tuple(shapes.AuditView.model_validate({"id": id, **asdict(entry)}) for id, entry in found)
    return shapes.AuditPage(entries=entries, next_cursor=entries[-1].id if len(entries) == limit else None)


def _who(principal: Principal, *, is_session: bool) -> shapes.WhoView:
    return shapes.WhoView(
        id=principal.id,
        name=principal.name,
        roles=principal.roles,
        projects=principal.projects,
        expires_at=None if principal.expires_at is None else _instant(principal.expires_at),
        is_session=is_session,
    )


def _shown(token: Token, used_at: float | None) -> shapes.TokenView:
    return shapes.TokenView(
        id=token.id,
        name=token.name,
        roles=token.roles,
        projects=token.projects,
        created_at=_instant(token.created_at),
        created_by=token.created_by,
        expires_at=None if token.expires_at is None else _instant(token.expires_at),
        revoked_at=None if token.revoked_at is None else _instant(token.revoked_at),
        last_used_at=None if used_at is None else _instant(used_at),
        is_valid=token.is_valid(time.time()),
    )


def _instant(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
