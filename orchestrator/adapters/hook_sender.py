"""One POST to an address that was resolved once, looked at, and connected to as it is: no second look at the name.

Follows no redirect, asks no proxy, reads nothing of the answer but its status, and is done within timeout_s in all.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from ssl import SSLContext

import httpx2

from orchestrator.domain.errors import Refused
from orchestrator.domain.hooks import Attempt
from orchestrator.notify.addresses import Address, Reach, Target, require_allowed, target_of

MAX_ADDRESSES = 3
"""Of one name, tried in turn where nothing listens."""
Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


async def resolve(host: str, port: int) -> Sequence[Address]:
    """Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(str(address[0]).partition("%")[0]) for *_, address in found))


class PinnedSender:
    """A Sender. resolver, tls: for tests; else the names and the certificates that the machine trusts."""

    def __init__(
        self, reach: Reach, *, timeout_s: float = 10.0, resolver: Resolve = resolve, tls: SSLContext | None = None
    ) -> None:
        self._reach = reach
        self._timeout_s = timeout_s
        self._resolver = resolver
        self._tls = tls

    async def send(self, url: str, headers: dict[str, str], body: bytes) -> Attempt:
        at, begun = time.time(), time.monotonic()
        code, error = None, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                code = await self._post(target_of(url, self._reach), headers, body)
        except Refused as refused:
            error = refused.message
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except (socket.gaierror, UnicodeError) as failed:
            error = f"its name cannot be resolved: {failed}"
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as failed:
            error = f"no answer: {str(failed)[:200] or type(failed).__name__}"
        return Attempt(at=at, seconds=time.monotonic() - begun, code=code, error=error or _why(code))

    async def _trusted(self) -> SSLContext:
        """Made once, and beside the loop: reading the authorities' certificates takes a while."""
        if self._tls is None:
            self._tls = await asyncio.to_thread(httpx2.create_ssl_context)
        return self._tls

    async def _post(self, target: Target, headers: dict[str, str], body: bytes) -> int:
        tls = await self._trusted()
        addresses = await self._resolver(target.host, target.port)
        require_allowed(addresses, self._reach)
        for number, address in enumerate(addresses[:MAX_ADDRESSES], start=1):
            try:
                return await self._post_to(address, tls, target, headers, body)
            except httpx2.ConnectError:
                if number == min(len(addresses), MAX_ADDRESSES):
                    raise
        raise OSError("it has no address")

    async def _post_to(
        self, address: Address, tls: SSLContext, target: Target, headers: dict[str, str], body: bytes
    ) -> int:
        host = f"[{address}]" if address.version == 6 else str(address)
        sent = {**headers, "Host": target.authority, "Accept-Encoding": "identity", "Connection": "close"}
        async with (
            httpx2.AsyncClient(
                trust_env=False,
                verify=tls,
                follow_redirects=False,
                timeout=self._timeout_s,
            ) as client,
            # The certificate has to be the name's, whatever address that is at.
            client.stream(
                "POST",
                f"{target.scheme}://{host}:{target.port}{target.path}",
                headers=sent,
                content=body,
                extensions={"sni_hostname": target.host},
            ) as answer,
        ):
            return answer.status_code


def _why(code: int | None) -> str:
    """Why an answer doesn't count; "" where it does."""
    if code is None or 200 <= code < 300:
        return ""
    if 300 <= code < 400:
        return f"it answered {code}, and redirects are not followed; give the address that it leads to"
    return f"it answered {code}"
