"""The supervisor's connection to one host's process: questions and answers, and how that process stands.

    refused, or another's greeting      ended: positive evidence
    what is sent is not acknowledged    its machine is silent: no power, no link, or cut off; no evidence of anything
    acknowledged                        its machine is there, whatever the process does: machines under load stay in touch

A connection that merely breaks proves nothing, and neither does silence: then this keeps trying and says nothing. It
refuses to know what is asked. Ray's own calls would do, at five to twenty milliseconds each where ranks keep the
processors busy, and some seconds after a link was cut.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from itertools import count
from math import inf

from orchestrator.ports import HostUnreachable

from .host_wire import BEAT, FRAME, PADDING, Kind, Place
from .reach import keep_alive

BEAT_S = 0.2
"""Something is sent this often, for the other kernel to acknowledge."""
STALE_S = 1.0
"""A connection on which nothing is acknowledged for so long is replaced: it would wait ever longer to try again."""
_CONNECT_S = 1.0
_RETRY_S = 0.1
_INFO = struct.Struct("=8B5I")
"""The head of the kernel's tcp_info; its last number counts segments that are sent and not acknowledged."""


class HostLink:
    """Follows one process from its construction, on a running loop, until `close`.

    gone: completes with the evidence, in words, once the process has certainly ended.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._acknowledged_at = self._loop.time()
        self._writer: asyncio.StreamWriter | None = None
        self._sent_at = -inf
        self._beating: asyncio.TimerHandle | None = None
        self._connected = asyncio.Event()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self.gone = asyncio.create_task(self._follow())

    def close(self) -> None:
        self.gone.cancel()

    @property
    def silent_s(self) -> float:
        """For how long its machine has acknowledged nothing of what it was sent; 0 while it does.

        Time in which this process was itself not run is no silence: what was acknowledged meanwhile counts.
        """
        if self._writer is not None and _is_acknowledged(self._writer):
            self._acknowledged_at = self._loop.time()
            return 0.0
        return self._loop.time() - self._acknowledged_at

    async def ask(self, kind: Kind, data: bytes) -> bytes:
        """The answer, whenever it comes. Raises HostUnreachable where it went with its connection; ask again."""
        await self._connected.wait()
        assert self._writer is not None
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._asked[number] = answer
        try:
            self._sent_at = self._loop.time()
            self._writer.write(FRAME.pack(len(data), number, kind) + data + PADDING)
            return await answer
        finally:
            del self._asked[number]

    async def _follow(self) -> str:
        place = self._place
        who = f"process {place.pid} at {place.address}:{place.port}"
        while True:
            writer = None
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(place.address, place.port)
                    # Its end may be told to nobody while its machine is cut off, and would not be told again.
                    keep_alive(writer)
                    greeting = await reader.readexactly(len(place.greeting))
                if greeting.decode("ascii", "replace") != place.greeting:
                    return f"{who} has ended: another one listens there"
                # Only now: of a process that has ended there is better to say than that a connection broke.
                self._lose_answers()
                writer.write(place.secret.encode())
                self._writer = writer
                self._connected.set()
                await self._talk(reader, writer)
                # Its end, or the network's: the next attempt tells.
            except ConnectionRefusedError:
                return f"{who} has ended: its machine answers that nobody listens there"
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                await asyncio.sleep(_RETRY_S)
            finally:
                self._writer = None
                self._connected.clear()
                if writer is not None:
                    writer.transport.abort()

    def _lose_answers(self) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(HostUnreachable("the answer was lost with the connection to the host"))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the connection ends, or nothing comes through it any more."""
        self._beat(writer)
        try:
            await self._listen(reader)
        finally:
            if self._beating is not None:
                self._beating.cancel()

    def _beat(self, writer: asyncio.StreamWriter) -> None:
        now = self._loop.time()
        if self.silent_s >= STALE_S:
            writer.transport.abort()  # which ends the listening
            return
        # A question that was asked lately is acknowledged like a beat. To what a process that reads nothing has not taken
        # nothing is added; its kernel is asked all the same.
        if now - self._sent_at >= BEAT_S / 2 and not writer.transport.get_write_buffer_size():
            self._sent_at = now
            writer.write(BEAT)
        # All links of a supervisor at once: it wakes up for one of them as for all.
        self._beating = self._loop.call_at(BEAT_S * (now // BEAT_S + 1), self._beat, writer)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length, number, _ = FRAME.unpack(await reader.readexactly(FRAME.size))
                data = await reader.readexactly(length)
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(data)
        except (OSError, asyncio.IncompleteReadError):
            return


def _is_acknowledged(writer: asyncio.StreamWriter) -> bool:
    """Whether everything sent has been acknowledged by the other kernel."""
    sock: socket.socket = writer.get_extra_info("socket")
    try:
        unacknowledged: int = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))[-1]
    except OSError:
        return False  # broken; the next connection tells
    return unacknowledged == 0
