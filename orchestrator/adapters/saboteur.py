"""Faults of the control plane on one machine: this very supervisor is killed, this very Redis made to stall."""

from __future__ import annotations

import os
import signal

from .redis_clients import RedisAddress, RedisClients, unavailable


class LocalSaboteur:
    """ports.Saboteur for a supervisor that runs in this process."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address

    async def kill_supervisor(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def stall_store(self, seconds: float) -> None:
        """Every client waits, this one included; the server itself lives."""
        clients = RedisClients(self._address)
        try:
            with unavailable(self._address):
                await clients.writes.client_pause(int(seconds * 1000))
        finally:
            await clients.close()
