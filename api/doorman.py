"""The layer that asks who somebody is, how often they have asked, and writes down what they asked to have changed.

Plain ASGI, so that event streams pass through it unbuffered. What a role may do is not its business (access.py), nor is
which job belongs to whom (scoped.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.domain.access import LOCAL, AuditEntry, Principal
from orchestrator.domain.errors import Unavailable
from orchestrator.ports import Keyring

from .dashboard import is_page
from .identities import Identities
from .problems import Problem
from .rates import Rates
from .settings import ApiSettings

log = logging.getLogger(__name__)
SAFE = ("GET", "HEAD", "OPTIONS")
UNASKED = frozenset({"/healthz", "/readyz"})
SIGN_IN = "/api/v1/session"
NOBODY = "nobody"
LOOK_AGAIN_S = 1.0
"""Streams are looked at this often: does their reader's token still hold?"""
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="everstep"'}


class Doorman:
    """keyring None: whoever reaches this API owns it; only for servers that nobody else can reach."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, keyring: Keyring | None, identities: Identities | None) -> None:
        self._app = app
        self._keyring, self._identities = keyring, identities
        self._max_open = settings.max_open_requests
        self._asked = Rates(settings.requests_per_s, settings.burst)
        self._mistaken = Rates(settings.mistakes_per_s, settings.mistakes_burst)
        self._refused = Rates(settings.refusals_per_s, settings.refusals_burst)
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["state"]["request_id"]
        try:
            principal = await self._who(scope)
            if principal is not None:
                self._allow(principal)
        except Unavailable as error:
            problem = Problem(503, "unavailable", str(error), headers={"Retry-After": "1"})
        except Problem as found:
            problem = found
        else:
            await self._let_in(scope, receive, send, principal)
            return
        await problem.response(request_id)(scope, receive, send)

    # --- who --------------------------------------------------------------------------------------------------------------

    async def _who(self, scope: Scope) -> Principal | None:
        """None where nobody needs to say. Raises Problem (401, 403, 429), Unavailable."""
        if self._identities is None:
            return LOCAL
        if scope["method"] in SAFE and (scope["path"] in UNASKED or is_page(scope["path"])):
            return None
        source, now = source_of(scope), time.monotonic()
        wait_s = self._mistaken.is_empty(source, now)
        if scope["path"] == SIGN_IN and scope["method"] == "POST":
            if wait_s:
                raise _too_often(wait_s, f"{source} has shown too many wrong tokens")
            # What it shows is looked at by the route, which says whether it was right.
            return None
        found, was_shown = await self._shown(Headers(scope=scope), scope)
        if found is not None:
            # Also where others at this address are mistaken: they may be another user's, or behind the same proxy.
            return found
        if wait_s:
            raise _too_often(wait_s, f"{source} has shown too many wrong tokens")
        if was_shown:
            self._mistaken.wait_s(source, now)
            detail = "this token is not known here, was revoked or has run out; use another one (everstep token create)"
            # A page that asks again and again is not to show the same cookie each time.
            gone = (
                {}
                if "authorization" in Headers(scope=scope)
                else {"Set-Cookie": f"{cookie_name(scope)}=; Max-Age=0; Path=/"}
            )
            raise Problem(401, "unauthenticated", detail, headers=CHALLENGE | gone)
        detail = (
            "nobody may ask without a token; send Authorization: Bearer TOKEN, set EVERSTEP_TOKEN or EVERSTEP_TOKEN_FILE "
            "(its owner's is admin.token in its state directory), or sign in"
        )
        raise Problem(401, "unauthenticated", detail, headers=CHALLENGE)

    async def _shown(self, headers: Headers, scope: Scope) -> tuple[Principal | None, bool]:
        """Whose credential it is, and whether any was shown at all."""
        assert self._identities is not None
        if (given := headers.get("authorization")) is not None:
            kind, _, text = given.partition(" ")
            return (await self._identities.of_token(text.strip()) if kind.lower() == "bearer" else None), True
        session = cookie_parser(headers.get("cookie", "")).get(cookie_name(scope))
        if session is None:
            return None, False
        found = await self._identities.of_session(session)
        if found is not None and scope["method"] not in SAFE:
            _require_own_page(headers)
        return found, True

    def _allow(self, principal: Principal) -> None:
        """Raises Problem (429)."""
        if wait_s := self._asked.wait_s(principal.id, time.monotonic()):
            raise _too_often(wait_s, f"{principal.name} asks too often")
        if self._open[principal.id] >= self._max_open:
            raise _too_often(1.0, f"{principal.name} has {self._max_open} requests open, streams included; end some")

    # --- what was done ----------------------------------------------------------------------------------------------------

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, principal: Principal | None) -> None:
        scope["state"]["principal"] = principal
        is_change = scope["method"] not in SAFE
        is_written = not is_change

        async def send_audited(message: Message) -> None:
            nonlocal is_written
            if not is_written and message["type"] == "http.response.start":
                is_written = True
                await self._write_down(scope, message["status"])
            await send(message)

        caller = principal.id if principal else NOBODY
        self._open[caller] += 1
        try:
            if is_change or principal is None or self._identities is None:
                await self._app(scope, receive, send_audited)
            else:
                await self._while_known(scope, receive, send)
        except Exception:
            # A bug: what answers it is further out than this, and what was asked for may have been done.
            if not is_written:
                await self._write_down(scope, 500)
            raise
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    async def _while_known(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream of events ends when who reads it would not be let in any more."""
        is_over = is_told = False

        async def receive_while_known() -> Message:
            nonlocal is_over
            heard = asyncio.ensure_future(receive())
            try:
                while not (await asyncio.wait({heard}, timeout=LOOK_AGAIN_S))[0]:
                    if not await self._is_known(scope):
                        is_over = True
                        return {"type": "http.disconnect"}
                return heard.result()
            finally:
                heard.cancel()

        async def send_noted(message: Message) -> None:
            nonlocal is_told
            is_told = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive_while_known, send_noted)
        if is_over and not is_told:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _is_known(self, scope: Scope) -> bool:
        """A store that is away says nothing against anybody."""
        try:
            return (await self._shown(Headers(scope=scope), scope))[0] is not None
        except Unavailable:
            return True

    async def _write_down(self, scope: Scope, status: int) -> None:
        """Before the answer leaves. Where the store is away the log has it: what was done cannot be undone for that."""
        principal: Principal | None = scope["state"]["principal"]
        if principal is None and 400 <= status < 500:
            # Nobody may write the record full.
            self._mistaken.wait_s(source_of(scope), time.monotonic())
        entry = AuditEntry(
            at=time.time(),
            principal=principal.id if principal else NOBODY,
            name=principal.name if principal else NOBODY,
            source=source_of(scope),
            method=scope["method"][:10],
            operation=getattr(scope.get("route"), "name", "") or "unmatched",
            path=scope["path"][:300],
            status=status,
            request_id=scope["state"]["request_id"],
        )
        if self._keyring is None:
            return
        if 400 <= status < 500 and self._refused.wait_s(entry.principal, time.monotonic()):
            # Whoever may do nothing may not push out of the record what others have done, either.
            log.warning("audit: %s (too many refusals to be kept in the store)", entry)
            return
        try:
            await self._keyring.record(entry)
        except Unavailable as error:
            log.warning("audit: %s (not in the store: %s)", entry, error)


def source_of(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def cookie_name(scope: Scope) -> str:
    """Cookies know no ports: each server of a machine has a name of its own."""
    server = scope.get("server")
    return f"everstep-{server[1] if server and server[1] else 0}"


def _require_own_page(headers: Headers) -> None:
    """A browser sends its cookie by itself, so it must also say that one of this server's pages made the request.

    That an Origin is this server's own has been seen to already (security.py).
    """
    if headers.get("origin") is None and headers.get("sec-fetch-site") != "same-origin":
        detail = "a session may change something only from this server's own page; send a token instead"
        raise Problem(403, "origin", detail)


def _too_often(wait_s: float, why: str) -> Problem:
    seconds = max(1, math.ceil(wait_s))
    return Problem(429, "too-often", f"{why}; try again in {seconds} s", headers={"Retry-After": str(seconds)})
