"""The Ray actor on a node: worker.host.Host behind two calls of bytes, and a socket that is open for as long as it lives.

The socket is how a supervisor on another machine learns within a millisecond that this process has ended, which Ray tells
at once only while the node's raylet lives.
"""

from __future__ import annotations

import asyncio
import os
import secrets

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError, StaleTerm
from worker.host import Host

from .host_wire import Call, Poll, Pulse, Reply, read

MAX_CONCURRENCY = 64
"""Polls and calls under way at once, abandoned ones included."""


class RayHost:
    """address: where this node's ranks and this host listen."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._host: Host | None = None
        self._pulse: Pulse | None = None
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()

    async def pulse(self) -> bytes:
        async with self._opening:
            if self._pulse is None:
                self._server = await asyncio.start_server(self._hold, self._address, 0)
                port = self._server.sockets[0].getsockname()[1]
                self._pulse = Pulse(address=self._address, port=port, greeting=secrets.token_hex(16), pid=os.getpid())
        return codec.dumps(self._pulse)

    async def handle(self, data: bytes) -> bytes:
        try:
            call = read(Call, data)
            await self._the_host().handle(call.term, call.effect, call.request)
        except StaleTerm as error:
            return codec.dumps(Reply(stale=str(error)))
        except EverstepError as error:
            return codec.dumps(Reply(refused=str(error)))
        return codec.dumps(Reply())

    async def poll(self, data: bytes) -> bytes:
        try:
            poll = read(Poll, data)
            envelopes, _ = await self._the_host().poll(poll.term, poll.after, poll.wait_s, poll.acked)
        except StaleTerm as error:
            return codec.dumps(Reply(stale=str(error)))
        except EverstepError as error:
            return codec.dumps(Reply(refused=str(error)))
        return codec.dumps(Reply(envelopes=envelopes))

    def _the_host(self) -> Host:
        """Made on the actor's loop, which is not there yet when the actor is made."""
        if self._host is None:
            self._host = Host(self._address)
        return self._host

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._pulse is not None
        writer.write(self._pulse.greeting.encode())
        try:
            await writer.drain()
            while await reader.read(1 << 10):
                pass  # a sign of life; it is our kernel that answers
        except OSError:
            pass
        finally:
            writer.close()
