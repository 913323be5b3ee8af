"""HTTP/1.1 for generating load: one kept connection, no more work per request than sending and reading takes.

A full client spends more on a request than the server does, on the same two cores. It understands answers with a length and
chunked ones that are event streams; it knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Told:
    """One server-sent event."""

    event: str
    id: str
    data: str


class Connection:
    """Connects on first use and again after an error, which it raises as OSError. headers: of every request."""

    def __init__(self, port: int, headers: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> None:
        self._port = port
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                reader = await self._send(method, path, body, headers or {})
                status, found = await _head(reader)
                answered = await reader.readexactly(int(found.get("content-length", "0")))
                if found.get("connection", "").lower() == "close":
                    self.close()
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.close()
            raise OSError(f"{method} {path}: {error!r}") from error
        return Answer(status, answered, time.perf_counter() - began)

    async def events(self, path: str, after: str) -> AsyncIterator[Told]:
        """Until the server ends them. Raises OSError where it refuses or the connection breaks."""
        try:
            reader = await self._send("GET", path, b"", {"Accept": "text/event-stream", "Last-Event-ID": after})
            status, _ = await _head(reader)
            if status == 204:
                return
            if status != 200:
                raise OSError(f"{path}: answered {status}")
            kept = b""
            while size := int(await reader.readline() or b"0", 16):
                kept += await reader.readexactly(size)
                await reader.readexactly(2)
                *whole, kept = kept.split(b"\n\n")
                for block in whole:
                    if (told := _told(block)) is not None:
                        yield told
        except (EOFError, ValueError) as error:
            raise OSError(f"{path}: {error!r}") from error
        finally:
            self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        kind = "content-type: application/json\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{self._headers}{lines}{kind}"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return reader


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = await reader.readline()
    if not first:
        raise EOFError("the connection was closed")
    headers = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split()[1]), headers


def _told(block: bytes) -> Told | None:
    fields: dict[str, str] = {}
    for line in block.decode().split("\n"):
        name, _, value = line.partition(":")
        fields[name] = value.removeprefix(" ")
    return Told(fields["event"], fields.get("id", ""), fields["data"]) if "event" in fields else None
