"""The process of a host that writes checkpoints: what a slot holds, made durable, one after the other and beside training.

It gives way to everything else: a low priority for processor and disk, one thread, and no torch, which would cost seconds
and memory. What cannot be written (a full disk) is said and forgotten. It owns the writing alone: it refuses to know ranks
and generations, and it ends with its host.

    host ── {"number": 7, "node": "n0", "index": 1, "attempt": 0} + fd of a full slot ──>  saver
         <── {"number": 7, "index": ..., "sha256": ..., "seconds": 0.2}      durable
         <── {"number": 7, "why": ...}                       not written
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil

from orchestrator.adapters.places import place
from orchestrator.domain import codec
from orchestrator.domain.checkpoint import ShardRef
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.requests import OpenHost

from .. import faultpoints
from ..faultpoints import faultpoint
from ..parentage import die_with_parent
from .shard import ShardWriter
from .slot import Filled, read_slot
from .snapshot import Snapshot
from .tier import own_disk

MESSAGE_BYTES = 1 << 16
POINTS = ("before_write", "after_write")
"""Named instants in a saver at which it can be killed on purpose; after_write is between what is durable and saying so."""
ENVIRONMENT = "EVERSTEP_SAVER_FAULTPOINT"
"""point:step,... kills the saver there, once for each snapshot of that step. For tests."""
_NICE, _GROUP_NICE = 19, 10
"""Of the process; and of its session, where the kernel schedules sessions: there 19 beside busy ranks would be 1 %."""


def main() -> None:
    """argv: the descriptor of the socket to the host, the host's pid. stdin: the OpenHost it works for."""
    host = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    order = codec.loads(OpenHost, sys.stdin.buffer.read())
    _give_way()  # only now: among busy ranks, importing at the lowest priority would take a minute
    writers: dict[Device, ShardWriter] = {}
    while True:
        data, fds, _, _ = socket.recv_fds(host, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        request = json.loads(data)
        try:
            said = _carry_out(order, writers, request, fds[0])
        finally:
            os.close(fds[0])
        host.send(json.dumps({"number": request["number"], **said}).encode())


def _carry_out(order: OpenHost, writers: dict[Device, ShardWriter], request: dict[str, Any], fd: int) -> dict[str, Any]:
    device = Device(NodeId(request["node"]), int(request["index"]))
    filled = read_slot(fd)
    _arm(filled, int(request["attempt"]))
    faultpoint("before_write")
    begun = time.monotonic()
    try:
        if device not in writers:
            root = place(order.checkpoint_dir)
            near = own_disk(order.spec.checkpoint.local, order.node, root)
            writers[device] = ShardWriter(root, order.profile, device, near=near)
        shard = _written(writers[device], filled)
    except OSError as error:
        print(f"step {filled.step} of {device} not written: {error}", flush=True)
        return {"why": str(error)}
    faultpoint("after_write")
    return {
        "index": shard.index,
        "sha256": shard.sha256,
        "is_local": shard.is_local,
        "seconds": time.monotonic() - begun,
    }


def _written(writer: ShardWriter, filled: Filled) -> ShardRef:
    state = np.frombuffer(filled.state, dtype=np.float32).reshape(len(filled.kinds), filled.width)
    snapshot = Snapshot(
        step=filled.step,
        answer=filled.answer,
        generation=filled.generation,
        pieces=filled.pieces,
        state=state,
        kinds=filled.kinds,
    )
    filled.tell(0)
    return writer.write(snapshot, progress=filled.tell)


def _give_way() -> None:
    os.nice(_NICE)
    with suppress(OSError):  # a kernel without it
        Path("/proc/self/autogroup").write_text(str(_GROUP_NICE))
    with suppress(OSError, psutil.Error):  # some containers refuse it
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def _arm(filled: Filled, attempt: int) -> None:
    wanted = os.environ.get(ENVIRONMENT, "").split(",")

    def strike(point: str) -> None:
        if not attempt and f"{point}:{filled.step}" in wanted:
            _end()

    if any(wanted):
        faultpoints.arm(strike)


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")


if __name__ == "__main__":
    main()
