"""The Ray actor on a node: it places worker.host.Host there, says where that listens, and lives for as long as it.

Requests and polls come over the host's own socket (host_server.py), so neither they nor the news of its end depend on the
node's raylet once the actor runs.
"""

from __future__ import annotations

import asyncio
import os
import sys

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError, StaleTerm
from orchestrator.domain.requests import CloseHost
from worker.host import Host

from .host_server import HostServer
from .host_wire import Call, Kind, Place, Poll, Reply, read
from .ray_environment import WORKER_MODULE

MAX_CONCURRENCY = 8
"""Supervisors that ask where it listens, at once."""

ANSWER_S = 0.1
"""For the last answer to leave."""


class RayHost:
    """address: where this node's ranks and this host listen."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._host: Host | None = None
        self._server = HostServer(address, {Kind.HANDLE: self._handle, Kind.POLL: self._poll})
        self._place: Place | None = None
        self._opening = asyncio.Lock()

    async def place(self) -> bytes:
        async with self._opening:
            if self._place is None:
                self._host = Host(self._address)  # on the actor's loop, which is not there yet when the actor is made
                self._place = await self._server.start()
                if worker := sys.modules.get(WORKER_MODULE):  # as it is where Ray has started this process
                    worker.begin_napping()
        return codec.dumps(self._place)

    async def _handle(self, data: bytes) -> bytes:
        assert self._host is not None
        try:
            call = read(Call, data)
            await self._host.handle(call.term, call.effect, call.request, call.memo)
            if isinstance(call.request, CloseHost):
                # By itself: Ray's word to end may not get here where a link was cut, and until it has ended its node's
                # devices are taken.
                asyncio.get_running_loop().call_later(ANSWER_S, os._exit, 0)
        except StaleTerm as error:
            return codec.dumps(Reply(stale=str(error)))
        except EverstepError as error:
            return codec.dumps(Reply(refused=str(error)))
        return codec.dumps(Reply())

    async def _poll(self, data: bytes) -> bytes:
        assert self._host is not None
        try:
            poll = read(Poll, data)
            if poll.asks:
                return codec.dumps(Reply(kept=self._host.kept()))
            envelopes, _ = await self._host.poll(poll.term, poll.after, poll.wait_s, poll.acked, poll.memo)
        except StaleTerm as error:
            return codec.dumps(Reply(stale=str(error)))
        except EverstepError as error:
            return codec.dumps(Reply(refused=str(error)))
        return codec.dumps(Reply(envelopes=envelopes))
