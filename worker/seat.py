"""One rank's process as its host sees it: descriptors, page, log, and what is known of its life.

It owns what must be closed when the process is gone. It refuses to know plans, events and supervisors.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import RankExited
from orchestrator.domain.ids import Device, Generation

from .checkpoint.custody import Custody
from .lifeline import Lifeline
from .logs import open_log, tail, turn_over
from .mail import BROKEN, Channel
from .page.layout import create_page
from .page.reader import PageReader
from .parentage import end_session

_LISTEN_BACKLOG = 128


@dataclass(slots=True, kw_only=True)
class Seat:
    """A process on a device, from the request to fork it until its end has been told."""

    number: int
    device: Device
    born: Generation
    """The generation it was made for; it has no part in earlier ones."""
    address: str
    channel: Channel
    bell: int
    """An eventfd that the process rings when it has said something that cannot wait."""
    page: PageReader
    lifeline: Lifeline
    custody: Custody
    log: Path
    log_start: int
    requested_at: float
    pid: int = 0
    pidfd: int = -1
    fork_s: float = 0.0
    prepared: Generation = Generation(0)
    """Last generation it was promised to."""
    formed: Generation = Generation(0)
    """Last generation it was told to form."""
    ready: Generation = Generation(0)
    """Last generation it said it was ready in."""
    reported: Generation = Generation(0)
    """Last generation it reported for."""
    stands_by: bool = False
    """It is built as far as it can be without a role."""
    is_understudy: bool = False
    """Nobody but its host knows of it: it was forked before it is needed."""
    is_finished: bool = False
    raised: str = ""
    doomed: str = ""
    """Why its host kills it."""
    stack: tuple[str, ...] = ()
    """Where it was when it was killed, where somebody asked."""
    is_watched: bool = False
    """Its end will be known as soon as it begins."""
    is_ending: bool = False
    """Its end has begun; how it ended is not known yet."""
    gone_at: float = 0.0
    closed_fds: bool = field(default=False, repr=False)

    @property
    def is_living(self) -> bool:
        return not self.doomed and not self.is_ending and not self.gone_at

    @property
    def is_forked(self) -> bool:
        return self.pid > 0

    def take(self, pid: int, pidfd: int) -> None:
        """The zygote has forked it. `pidfd` becomes this seat's."""
        self.pid, self.pidfd = pid, pidfd
        self.fork_s = time.monotonic() - self.requested_at
        if self.doomed:
            self._kill()

    def take_over(self, generation: Generation) -> None:
        """An understudy becomes the process on its device, for `generation`."""
        self.is_understudy = self.stands_by = False
        self.born = self.prepared = generation
        turn_over(self.log)
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.fork_s = 0.0  # paid before it was needed

    def kill(self, why: str) -> None:
        """SIGKILL, exactly this process: a pidfd never means another one that was given the same number."""
        if self.is_living:
            self.doomed = why
            self.execute()

    def execute(self) -> None:
        """SIGKILL to one that is doomed and still there."""
        if self.doomed and self.pidfd >= 0 and not self.closed_fds:
            self._kill()

    def send(self, number: signal.Signals) -> None:
        """Raises OSError where it has ended."""
        if not self.closed_fds and self.pidfd >= 0:
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        if self.closed_fds:
            return
        self.closed_fds = True
        self.channel.close()
        os.close(self.bell)
        self.page.close()
        self.lifeline.close()
        self.custody.leave()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def exit_event(self, exit_code: int, finished: bool) -> RankExited:
        """What its end means, read from its page, its last words and its log."""
        message, user_error = self._meaning(exit_code, finished)
        return RankExited(
            device=self.device,
            pid=self.pid,
            exit_code=exit_code,
            report=self.last_report(message),
            message=message,
            log_tail=() if exit_code == -signal.SIGKILL else tail(self.log, since=self.log_start),
            fault_point=self.page.fault(),
            user_error=user_error,
            seconds_ago=time.monotonic() - self.gone_at if self.gone_at else 0.0,
            stack=self.stack,
        )

    def last_report(self, cause: str) -> RankReport:
        """Read from its page, once it has ended."""
        # Until it has reported, its last word is owed to the generation it trains, even if the next one is being prepared.
        owes = self.formed > self.reported
        generation = self.formed if owes else max(self.prepared, self.formed, self.reported)
        return self.page.report(self.device, generation, cause)

    def _meaning(self, exit_code: int, finished: bool) -> tuple[str, bool]:
        if self.raised:
            return self.raised, True
        if self.doomed:
            return self.doomed, False
        if exit_code < 0 and (point := self.page.fault()):
            return f"killed at fault point {point}", False
        if exit_code < 0:
            return f"killed by {signal.Signals(-exit_code).name}", False
        if exit_code == BROKEN:
            return f"the rank's own machinery failed (exit code {exit_code}); its log says how", False
        return f"the training program exited by itself with code {exit_code} before it was told to", not finished

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it was quicker, and has been reaped with what it had started
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            end_session(self.pid)


def open_seat(
    number: int, device: Device, generation: Generation, host_address: str, log_dir: Path, *, is_understudy: bool = False
) -> tuple[Seat, tuple[int, ...]]:
    """A seat whose process is still to be forked, and the descriptors to fork it with: see birth.Inherited.

    The descriptors are the caller's to close once they are sent. The listener is bound here, before the fork, so that its
    address can be in the next plan without anybody waiting for the process.
    """
    listener = socket.create_server((host_address, 0), backlog=_LISTEN_BACKLOG)
    ours, theirs = socket.socketpair()
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    page = create_page()
    lifeline = Lifeline(page)
    lifeline.make()
    custody = Custody(device)
    path = log_dir / f"{device.node}-{device.index}.log"
    if not is_understudy:  # beside one the rank whose log it is lives
        turn_over(path)
    log = open_log(path)
    host, port = listener.getsockname()[:2]
    seat = Seat(
        number=number,
        device=device,
        born=generation,
        prepared=generation,
        address=f"{host}:{port}",
        channel=Channel(ours),
        bell=bell,
        page=PageReader(page),
        lifeline=lifeline,
        custody=custody,
        log=path,
        log_start=os.fstat(log).st_size,
        is_understudy=is_understudy,
        requested_at=time.monotonic(),
    )
    return seat, (theirs.detach(), os.dup(bell), listener.detach(), page, log, *map(os.dup, custody.fds))
