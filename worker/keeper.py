"""The host's end of its zygote: starting it, asking it for forks, hearing what became of them, ending it with its children.

It owns the zygote's process and socket; it refuses to know what the forked processes are for.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.adapters.index import own_folder
from orchestrator.adapters.places import place
from orchestrator.adapters.starting_point import begun_from
from orchestrator.domain import codec
from orchestrator.domain.requests import OpenHost
from orchestrator.domain.spec import DeviceKind

from .child import start
from .lodging import Lodging, Policy
from .logs import tail

_MESSAGE_BYTES = 1 << 16
Heard = Callable[[dict[str, Any], int], None]
"""Called with each message and the descriptor that came with it, or -1."""


def _devices_for(kind: DeviceKind) -> dict[str, str]:
    """Ranks that compute on CPU see no other device: torch would start threads for it, and threads cannot be forked."""
    return {} if kind == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}


def _folders(order: OpenHost) -> tuple[str, ...]:
    """Of checkpoints that ranks read. Those of its own are made here: what is not there cannot be shown to anybody."""
    own = place(order.checkpoint_dir)
    copies = [own_folder(order.spec.checkpoint.local, order.node, own)] if order.spec.checkpoint.local else []
    found = [*(one for one in (own, *copies) if isinstance(one, Path)), *begun_from(order.spec)]
    for folder in found:
        with suppress(OSError):  # then nothing can be saved there, which is said when it is tried
            folder.mkdir(parents=True, exist_ok=True)
    return tuple(map(str, found))


class Zygote:
    """Used on one asyncio loop. `heard` gets the messages of worker/zygote.py, `ended` its exit code, once."""

    def __init__(self, order: OpenHost, secrets: Mapping[str, str], heard: Heard, ended: Callable[[int], None]) -> None:
        self._order = order
        self._secrets = secrets
        self._heard = heard
        self._ended = ended
        self._log = Path(order.log_dir) / f"{order.node}-zygote.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pidfd = -1
        self._lodging: Lodging | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Raises OSError where no process can be started, EverstepError where it cannot be given a place of its own."""
        # Another cluster's job may be called the same.
        key = f"{self._order.job} {self._order.log_dir}"
        self._lodging = Lodging(Policy.of(os.environ), self._order.job, _folders(self._order), key=key)
        cell = self._lodging.cell
        environment = {**self._secrets, **_devices_for(self._order.spec.train.device), **cell.environment}
        said = codec.dumps(cell).decode()
        child = start("worker.zygote", codec.dumps(self._order), self._log, environment, [said])
        self._process, self._socket, self._pidfd = child.process, child.socket, child.pidfd
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._listen)
        loop.add_reader(self._pidfd, self._bury)

    def fork(self, seat: int, index: int, fds: tuple[int, ...], *, rehearses: bool = False) -> None:
        """Ask for a rank; answered by "forked". rehearses: it is not needed yet, and says when it stands by."""
        if self._socket is None:
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is about to be told
            socket.send_fds(
                self._socket, [json.dumps({"seat": seat, "index": index, "rehearses": rehearses}).encode()], list(fds)
            )

    def kill(self) -> None:
        """SIGKILL to it and to whatever its ranks have started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the group is still this one

    def log_tail(self) -> tuple[str, ...]:
        return tail(self._log)

    def _listen(self) -> None:
        while self._socket is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                asyncio.get_running_loop().remove_reader(self._socket)
                return
            self._heard(json.loads(data), fds[0] if fds else -1)

    def _bury(self) -> None:
        assert self._process is not None and self._socket is not None
        self._listen()  # its last words come before its end
        self.kill()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        loop.remove_reader(self._socket)
        os.close(self._pidfd)
        self._socket.close()
        self._socket = None
        exit_code = self._process.wait()
        if self._lodging is not None:
            loop.run_in_executor(None, self._lodging.leave)
        self._process = None
        self._ended(exit_code)
