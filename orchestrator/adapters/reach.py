"""Whether a process on another machine can be reached, told by one TCP connection that is kept open to its port.

    refused                          GONE           its machine says that nobody listens there: positive evidence
    connected                        REACHED
    no answer, no route, cut off     UNREACHABLE    silence: no evidence of anything

The kernel's keepalive asks in the background, so that silence shows within SILENT_S without a byte of ours. What follows
from any of it is not decided here.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from enum import Enum

SILENT_S = 3
"""Without an answer a connection counts as broken after this long."""
_CONNECT_S = 2.0
_RETRY_S = 0.2


class Contact(Enum):
    UNKNOWN = "unknown"
    REACHED = "reached"
    UNREACHABLE = "unreachable"
    GONE = "gone"


class Reach:
    """Follows one port from its construction (on a running loop) until `close`; `contact` is how it stands."""

    def __init__(self, address: str, port: int) -> None:
        self.contact = Contact.UNKNOWN
        self._address = address
        self._port = port
        self._task = asyncio.create_task(self._follow())

    def close(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        while self.contact is not Contact.GONE:
            writer = None
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(self._address, self._port)
                keep_alive(writer)
                self.contact = Contact.REACHED
                while await reader.read(1 << 12):
                    pass
                # Its end, or it has no patience with somebody who says nothing: the next attempt tells.
            except ConnectionRefusedError:
                self.contact = Contact.GONE
            except ConnectionResetError:
                pass  # likewise
            except (OSError, TimeoutError):
                self.contact = Contact.UNREACHABLE
            finally:
                if writer is not None:
                    writer.close()
            await asyncio.sleep(_RETRY_S)


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the kernel notice within SILENT_S that the other machine does not answer any more."""
    sock: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):  # broken already; reading says so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S - 1)
