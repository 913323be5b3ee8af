"""Starting a process that runs our code beside training, told what it is for and tied to the one that started it.

It owns the command line, the environment and the descriptors of a start; it refuses to know what the process does, what is
said over its socket and what its end means.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .logs import open_log, turn_over

# `import numpy` alone would start a thread otherwise, and a process with threads must not be forked.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Whatever the host was started with to speak to Ray, Redis or the API: user code runs below here and is to have none of it.
_PREFIXES_OF_SECRETS = (
    "RAY_",
    "FLAGS_redis",
    "EVERSTEP_TOKEN",
    "EVERSTEP_REDIS",
    "EVERSTEP_RAY",
    "EVERSTEP_API",
    "EVERSTEP_JOIN",
)


@dataclass(frozen=True, slots=True)
class Child:
    """socket: to it, of whole messages, non-blocking. pidfd: readable when it has ended. Both are the caller's to close."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    pidfd: int


def start(
    module: str, order: bytes, log: Path, environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> Child:
    """`python -m module SOCKET OUR_PID ...` in a session of its own, the order on its stdin and what it says in the log.

    environment: on top of ours without secrets. Raises OSError where no process can be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    stdin = os.memfd_create("everstep-order", os.MFD_CLOEXEC)
    try:
        os.write(stdin, order)
        os.lseek(stdin, 0, os.SEEK_SET)
        turn_over(log)
        said = open_log(log)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), *arguments],
                stdin=stdin,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**of_one_thread(os.environ), **(environment or {})},
            )
        finally:
            os.close(said)
        # What a crash would leave on the disk is the job's memory, whatever is in it.
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
    except OSError:
        ours.close()
        raise
    finally:
        os.close(stdin)
        theirs.close()
    return Child(process, ours, os.pidfd_open(process.pid))


def of_one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """For a process that runs our code beside training: no secrets, one thread, our modules."""
    public = {name: value for name, value in environment.items() if not name.startswith(_PREFIXES_OF_SECRETS)}
    return {**public, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
