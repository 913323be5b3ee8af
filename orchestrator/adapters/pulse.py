"""Positive evidence that a process has ended: its socket closed, and its machine says that nobody listens there any more.

A connection that merely breaks proves nothing, and neither does silence: then this keeps trying and says nothing.
"""

from __future__ import annotations

import asyncio

from .host_wire import Pulse
from .reach import keep_alive

_CONNECT_S = 2.0
_RETRY_S = 0.1


async def until_gone(pulse: Pulse) -> str:
    """Returns, in words, once the process has certainly ended."""
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
            await reader.read()
            # Its end, or the network's: the next attempt tells.
        except ConnectionRefusedError:
            return f"{who} has ended: its machine answers that nobody listens there"
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            await asyncio.sleep(_RETRY_S)
        finally:
            if writer is not None:
                writer.close()
