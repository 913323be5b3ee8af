"""How a process on another machine stands, told by one connection to it that is kept open: ended for certain, or silent.

    refused, or another's greeting      ended: positive evidence
    what is sent is not acknowledged    its machine is silent: no power, no link, or cut off; no evidence of anything
    acknowledged                        its machine is there, whatever the process does: machines under load stay in touch

A connection that merely breaks proves nothing, and neither does silence: then this keeps trying and says nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from .host_wire import Pulse
from .reach import keep_alive

BEAT_S = 0.2
"""A byte is sent this often, for the other kernel to acknowledge."""
_CONNECT_S = 1.0
_RETRY_S = 0.1
_INFO = struct.Struct("=8B5I")
"""The head of the kernel's tcp_info; its last number counts segments that are sent and not acknowledged."""


class Lifeline:
    """Follows one process from its construction, on a running loop, until `close`.

    gone: completes with the evidence, in words, once the process has certainly ended.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._loop = asyncio.get_running_loop()
        self._acknowledged_at = self._loop.time()
        self._writer: asyncio.StreamWriter | None = None
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

    async def _follow(self) -> str:
        pulse = self._pulse
        who = f"process {pulse.pid} at {pulse.address}:{pulse.port}"
        while True:
            writer = None
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(pulse.address, pulse.port)
                    # Its end may be told to nobody while its machine is cut off, and would not be told again.
                    keep_alive(writer)
                    greeting = await reader.readexactly(len(pulse.greeting))
                if greeting.decode("ascii", "replace") != pulse.greeting:
                    return f"{who} has ended: another one listens there"
                self._writer = writer
                await self._beat(reader, writer)
                # Its end, or the network's: the next attempt tells.
            except ConnectionRefusedError:
                return f"{who} has ended: its machine answers that nobody listens there"
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                await asyncio.sleep(_RETRY_S)
            finally:
                self._writer = None
                if writer is not None:
                    writer.close()

    async def _beat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the connection ends."""
        ended = asyncio.ensure_future(reader.read())
        try:
            while not ended.done():
                # What a process that reads nothing has not taken is not added to; its kernel is asked all the same.
                if not writer.transport.get_write_buffer_size():
                    writer.write(b".")
                await asyncio.wait({ended}, timeout=BEAT_S)
                _ = self.silent_s  # notes what has been acknowledged by now
        finally:
            ended.cancel()
        with suppress(asyncio.CancelledError):
            await ended


def _is_acknowledged(writer: asyncio.StreamWriter) -> bool:
    """Whether everything sent has been acknowledged by the other kernel."""
    sock: socket.socket = writer.get_extra_info("socket")
    try:
        unacknowledged: int = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))[-1]
    except OSError:
        return False  # broken; the next connection tells
    return unacknowledged == 0
