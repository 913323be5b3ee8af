"""The process that ranks are forked from: everything a job imports, loads and sets up once, and nothing that runs.

It owns its children: it forks them on request, reaps them and says how they ended. It refuses to start threads (a fork
copies only one), to touch an accelerator, and to live without its host.

    host ── {"seat": 3, "index": 0, "rehearses": false} + fds (control, bell, listener, page, log, slots) ──>  zygote
         <── {"kind": "warm"}                                                   once
         <── {"kind": "forked", "seat": 3, "pid": p} + pidfd
         <── {"kind": "exited", "pid": p, "code": c}                            negative for a signal
         <── {"kind": "failed", "message": m}                                   last words
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.ids import Device
from orchestrator.domain.requests import OpenHost
from orchestrator.domain.secrecy import Veil

from . import rank
from .birth import Inherited, Job
from .confinement import Cell, enter
from .data import sources
from .parallel.world import warm_up_world
from .parentage import die_with_parent, end_session, reaped
from .program import load_program
from .veiled import cover_output
from .warming import warm

MESSAGE_BYTES = 1 << 16


def main() -> None:
    """argv: the descriptor of the socket to the host, the host's pid, its Cell. stdin: the OpenHost it works for."""
    host = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    order, cell = codec.loads(OpenHost, sys.stdin.buffer.read()), codec.loads(Cell, sys.argv[3].encode())
    _forget_stdin()
    cover_output(Veil(os.environ.get(variable, "") for variable in order.spec.secrets))
    try:
        text = _text(order, cell)
        enter(cell)
        die_with_parent(int(sys.argv[2]))  # again: it is forgotten when a process becomes another user's
        job = _warmed(order, text)
    except BaseException as error:
        _fail(host, error)
    try:
        _serve(host, job)
    except BaseException as error:
        _fail(host, error)


def _text(order: OpenHost, cell: Cell) -> torch.Tensor:
    """Read before it is anybody else: the folder it lies in may be closed to others."""
    tokens = sources.load(order.spec.data, for_everybody=cell.is_apart)
    sources.require_same(tokens, order.profile.text_sha256)
    return tokens


def _warmed(order: OpenHost, tokens: torch.Tensor) -> Job:
    torch.set_num_threads(1)
    program = load_program(order.spec.program)
    warm(order.spec, order.profile, program)
    warm_up_world()
    _require_forkable()
    gc.collect()
    # What is shared with every rank is not worth walking at each collection, and walking it would unshare its pages.
    gc.freeze()
    return Job(order=order, program=program, tokens=tokens)


def _serve(host: socket.socket, job: Job) -> NoReturn:
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poller = select.poll()
    poller.register(host, select.POLLIN)
    poller.register(reader, select.POLLIN)
    children: set[int] = set()
    _say(host, kind="warm")
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if reader.fileno() in ready:
            reader.recv(MESSAGE_BYTES)
            _reap(host, children)
        if host.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(host, MESSAGE_BYTES, len(Inherited._fields), socket.MSG_CMSG_CLOEXEC)
            if not data:
                _end(children)
            request = json.loads(data)
            me = Device(job.order.node, int(request["index"]))
            work = job.rehearsing() if request.get("rehearses") else job
            _fork(host, work, me, int(request["seat"]), Inherited(*fds), children)


def _fork(host: socket.socket, job: Job, me: Device, seat: int, inherited: Inherited, children: set[int]) -> None:
    _require_forkable()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        rank.main(job, me, inherited, parent)
    children.add(pid)
    # Taken before anybody could have reaped it: this descriptor never means another process.
    pidfd = os.pidfd_open(pid)
    _say(host, kind="forked", seat=seat, pid=pid, fds=[pidfd])
    os.close(pidfd)
    for fd in inherited:
        os.close(fd)


def _reap(host: socket.socket, children: set[int]) -> None:
    while children:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        pid = ended.si_pid
        children.discard(pid)
        _say(host, kind="exited", pid=pid, code=reaped(pid))


def _end(children: set[int]) -> NoReturn:
    """The host is gone, so nobody can want its ranks."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)  # ours and not reaped yet, so still this child
        end_session(pid)
    os._exit(0)


def _fail(host: socket.socket, error: BaseException) -> NoReturn:
    traceback.print_exception(error)
    sys.stderr.flush()
    _say(host, kind="failed", message=f"{type(error).__name__}: {error}"[:2000])
    os._exit(1)


def _say(host: socket.socket, *, fds: list[int] | None = None, **message: object) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the poll loop sees the same end of file and ends
        socket.send_fds(host, [json.dumps(message).encode()], fds or [])


def _require_forkable() -> None:
    """Raises EverstepError: a child could use no CUDA, and a lock that another thread holds stays locked in it for ever."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise EverstepError(
            "the training program used CUDA while it was imported or warmed and ranks that are forked then cannot; "
            "put on a device what is made in its build(), on the device of the leaves"
        )
    threads = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if threads:
        names = ", ".join((task / "comm").read_text().strip() for task in threads)
        raise EverstepError(
            f"the training program started {len(threads)} thread(s) while it was imported or warmed ({names}) and ranks "
            "are forked from one thread only; start them when the first step runs"
        )


def _forget_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


if __name__ == "__main__":
    main()
