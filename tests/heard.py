"""A receiver of webhooks on a loopback port: what it hears it keeps, and it answers what a test says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ssl import SSLContext


@dataclass(frozen=True)
class Message:
    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """answers: statuses to come, then 204 for ever. gate: while it is closed nothing is answered."""

    port: int = 0
    messages: list[Message] = field(default_factory=list)
    answers: deque[int] = field(default_factory=deque)
    always: int = 204
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/told"

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, value in (one.split(": ", 1) for one in rest)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.messages.append(Message(line, headers, body))
            self.came.set()
            await self.gate.wait()
            code = self.answers.popleft() if self.answers else self.always
            more = f"Location: http://127.0.0.1:{self.port}/elsewhere\r\n" if code == 302 else ""
            writer.write(f"HTTP/1.1 {code} Said\r\n{more}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving(tls: SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    receiver.gate.set()
    server = await asyncio.start_server(receiver.hear, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.close()
