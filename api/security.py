"""The outermost layer: whose requests are answered at all, how large they may be, and the id each one carries.

Plain ASGI, so that event streams pass through it unbuffered. Nobody has been asked who they are yet: a web page in the same
browser must not be able to reach what is behind this (Host against rebinding, Origin against forgery).
"""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Problem
from .settings import ApiSettings

REQUEST_ID = "X-Request-ID"


class Gatekeeper:
    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)
        self._max_body_bytes = settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        problem = self._refuse(Headers(scope=scope), scope["method"])
        if problem is not None:
            await problem.response(request_id)(scope, receive, send_marked)
            return
        await self._app(scope, self._bounded(receive), send_marked)

    def _refuse(self, headers: Headers, method: str) -> Problem | None:
        host = headers.get("host", "")
        if _hostname(host) not in self._hosts:
            allowed = ", ".join(sorted(self._hosts))
            return Problem(400, "host", f"host {host[:200]!r} is not served here; this API answers to {allowed}")
        origin = headers.get("origin")
        is_reading = method in ("GET", "HEAD", "OPTIONS")
        # With its port: a page served by another program of this machine is another page.
        if origin is not None and not is_reading and urlsplit(origin).netloc.lower() != host.lower():
            return Problem(403, "origin", f"a page of {origin[:200]!r} may change nothing here; use this API's own address")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body_bytes:
            return Problem(413, "too-large", _too_large(self._max_body_bytes))
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """A body without a length is counted as it comes."""
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                raise HTTPException(413, _too_large(self._max_body_bytes))
            return message

        return counted


def _hostname(host: str) -> str:
    """`localhost` of `LOCALHOST:8265`, `::1` of `[::1]:80`; empty for anything that is not host[:port]."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host and "@" not in host else ""


def _too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes; send less"
