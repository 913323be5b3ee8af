"""A host's end of its connections: whoever knows the secret may ask, and is answered; all others are greeted and no more.

The socket is open for exactly as long as the process lives, which is what makes a refused connection evidence of its end.
It refuses to know what questions mean.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping

from .host_wire import FRAME, QUIET_BYTES, Kind, Place

Answer = Callable[[bytes], Awaitable[bytes]]


class HostServer:
    """address: where it listens; answers: by kind of question, each under way on its own."""

    def __init__(self, address: str, answers: Mapping[Kind, Answer]) -> None:
        self._address = address
        self._answers = answers
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> Place:
        """Listen, on the running loop; where and under which words."""
        self._server = await asyncio.start_server(self._serve, self._address, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._place = Place(
            address=self._address,
            port=port,
            greeting=secrets.token_hex(16),
            secret=secrets.token_hex(16),
            pid=os.getpid(),
        )
        return self._place

    def hang_up(self) -> None:
        """End every connection; who has not heard an answer asks again."""
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        """Listen no more: to whoever asks, this process has ended."""
        if self._server is not None:
            self._server.close()
        self.hang_up()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            writer.write(self._place.greeting.encode())
            secret = self._place.secret.encode()
            if not hmac.compare_digest(await reader.readexactly(len(secret)), secret):
                return
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, QUIET_BYTES)
            while True:
                length, number, kind = FRAME.unpack(await reader.readexactly(FRAME.size))
                data = await reader.readexactly(length)
                if kind != Kind.BEAT:
                    task = asyncio.create_task(self._answer(writer, number, Kind(kind), data))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, number: int, kind: Kind, data: bytes) -> None:
        answer = await self._answers[kind](data)
        if not writer.is_closing():
            writer.write(FRAME.pack(len(answer), number, Kind.ANSWER) + answer)
