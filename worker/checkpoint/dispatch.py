"""The host's end of its saver: giving it what ranks have handed over, slot by slot, and telling what became of it.

The saver is started for the first snapshot, and again whenever it has ended before it was done; a slot is freed only when
its fate is known, so nothing is lost with a saver and nothing is announced twice. It owns the saver's process and what
waits for it; it refuses to know files, votes and which checkpoints there are.

    rank: full ──> waits ──> in hand ──> written: ShardSaved ──> free
                     |          `──────> cannot be: ShardNotSaved ──> free
                     `- a newer generation has begun: nobody would accept it any more ──> free
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.domain import codec
from orchestrator.domain.checkpoint import ShardRef
from orchestrator.domain.host_events import HostEvent, ShardNotSaved, ShardSaved
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.requests import OpenHost

from ..child import start
from ..processes import look_at
from .custody import Custody
from .slot import Slot

MAX_ATTEMPTS = 3
"""Savers that may end over one slot before it is given up."""
BEAT_S = 0.5
STILL_S = 60.0
"""A saver that has used no processor and moved no byte for this long while something is in its hand is killed."""
_MESSAGE_BYTES = 1 << 16
_CLOSE_S = 10.0


@dataclass(slots=True)
class _Parcel:
    custody: Custody
    place: int
    number: int
    """Of the order to write it; one for each attempt."""
    attempts: int = 0

    @property
    def slot(self) -> Slot:
        return self.custody.slot(self.place)


class Dispatch:
    """Used on one asyncio loop. tell: takes what becomes of snapshots."""

    def __init__(self, order: OpenHost, tell: Callable[[HostEvent], None]) -> None:
        self._order = order
        self._tell = tell
        self._log = Path(order.log_dir) / f"{order.node}-saver.log"
        self._waiting: deque[_Parcel] = deque()
        self._in_hand: _Parcel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pidfd = -1
        self._last_number = 0
        self._seen: tuple[float, int] = (0.0, 0)
        self._still_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._gone = asyncio.Event()

    @property
    def saver_pid(self) -> int:
        """0 where there is none."""
        return self._process.pid if self._process else 0

    def under_way(self) -> list[tuple[Device, Slot]]:
        """What has been handed over and is not written yet, the one in hand first."""
        parcels = [parcel for parcel in (self._in_hand, *self._waiting) if parcel is not None]
        return [(parcel.custody.device, parcel.slot) for parcel in parcels]

    def collect(self, custody: Custody) -> None:
        """Whatever in it has become full is written from now on."""
        for place in custody.find():
            if self._closing:
                custody.settle(place, "its host was closed")
            else:
                self._last_number += 1
                self._waiting.append(_Parcel(custody, place, self._last_number))
        self._go_on()

    def begin(self, generation: Generation) -> None:
        """A generation is formed: what still waits and is older than the one before is not worth writing any more."""
        for parcel in [p for p in self._waiting if p.slot.generation < generation - 1]:
            self._waiting.remove(parcel)
            parcel.custody.settle(parcel.place, f"generation {generation} has begun")

    async def close(self) -> None:
        """End the saver, at whatever it is; returns when it is gone."""
        self._closing = True
        if self._process is not None:
            self._process.kill()
            with suppress(TimeoutError):  # the kernel ends it when the disk lets go of it
                async with asyncio.timeout(_CLOSE_S):
                    await self._gone.wait()
        self._give_up_all("its host was closed")

    # --- what waits -------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._in_hand is not None or not self._waiting or self._closing:
            return
        parcel = self._in_hand = self._waiting.popleft()
        try:
            if self._process is None:
                self._start()
        except OSError as error:
            self._end_parcel(f"no process can be started to write it: {error}")
            return
        self._hand(parcel)

    def _hand(self, parcel: _Parcel) -> None:
        assert self._socket is not None
        device = parcel.custody.device
        request = {"number": parcel.number, "node": device.node, "index": device.index, "attempt": parcel.attempts}
        self._still_s = 0.0
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is about to be told
            socket.send_fds(self._socket, [json.dumps(request).encode()], [parcel.custody.fds[parcel.place]])
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._look)

    def _end_parcel(self, why: str, shard: ShardRef | None = None) -> None:
        parcel, self._in_hand = self._in_hand, None
        assert parcel is not None
        slot, device = parcel.slot, parcel.custody.device
        if shard is not None:
            self._tell(ShardSaved(generation=slot.generation, step=slot.step, shard=shard))
        else:
            self._tell(ShardNotSaved(device=device, generation=slot.generation, step=slot.step, message=why))
        parcel.custody.settle(parcel.place, why)
        self._go_on()

    def _give_up_all(self, why: str) -> None:
        left, self._in_hand = [p for p in (self._in_hand, *self._waiting) if p is not None], None
        self._waiting.clear()
        for parcel in left:
            parcel.custody.settle(parcel.place, why)

    # --- its process ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        child = start("worker.checkpoint.saver", codec.dumps(self._order), self._log)
        self._process, self._socket, self._pidfd = child.process, child.socket, child.pidfd
        self._gone.clear()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._listen)
        loop.add_reader(self._pidfd, self._bury)

    def _listen(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(self._socket)
                return
            self._hear(json.loads(data))

    def _hear(self, said: dict[str, Any]) -> None:
        parcel = self._in_hand
        if parcel is None or parcel.number != said["number"]:
            return
        if "why" in said:
            self._end_parcel(str(said["why"]))
        else:
            shard = ShardRef(
                device=parcel.custody.device,
                index=str(said["index"]),
                sha256=str(said["sha256"]),
                is_local=bool(said["is_local"]),
                kind="journal" if parcel.slot.is_entry else "base",
                write_s=float(said["seconds"]),
                stall_s=parcel.slot.stall_s,
            )
            self._end_parcel("", shard)

    def _bury(self) -> None:
        assert self._process is not None and self._socket is not None
        self._listen()  # what it said before it ended counts
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        loop.remove_reader(self._socket)
        os.close(self._pidfd)
        self._socket.close()
        self._socket = None
        exit_code = self._process.wait()
        self._process = None
        self._gone.set()
        if (parcel := self._in_hand) is None or self._closing:
            return
        parcel.attempts += 1
        if parcel.attempts >= MAX_ATTEMPTS:
            self._end_parcel(f"{parcel.attempts} savers ended while they wrote it, the last with exit code {exit_code}")
            return
        self._last_number += 1
        parcel.number = self._last_number
        self._in_hand = None
        self._waiting.appendleft(parcel)
        self._go_on()

    def _look(self) -> None:
        """While something is in hand: let ranks that wait see that it gets on, and end a saver that does not."""
        self._timer = None
        if self._in_hand is None or self._process is None or self._closing:
            return
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._look)
        before, self._seen = self._seen, _activity(self._process.pid)
        if self._seen != before:
            self._still_s = 0.0
            for parcel in (self._in_hand, *self._waiting):
                parcel.slot.beat()
            return
        self._still_s += BEAT_S
        if self._still_s >= STILL_S:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def _activity(pid: int) -> tuple[float, int]:
    """What processor it has had, and how many bytes it has read and written."""
    process = look_at(pid)
    try:
        counts = [int(line.split(":")[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines()]
    except (OSError, ValueError):
        counts = []
    return (process.cpu_s if process else 0.0, sum(counts))
