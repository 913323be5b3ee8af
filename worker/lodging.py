"""Who a job's processes are on this machine: a user of their own by number, a folder for what is temporary, and limits.

Nobody has to create that user. A number is one job's for as long as a host of it lives: the lock on a file of root's says
so, and goes with whoever holds it. Where a host does not run as root, or is told so, its job runs as the host does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.domain.errors import EverstepError

from . import private_tmp
from .confinement import Cell

VARIABLES = "EVERSTEP_JOBS_"
"""What a machine's processes are told of this, in the words of the configuration's section `jobs`."""
USERS = Path("/run/everstep-users")
"""Who has which number. On the machine's own, root's folder: it is empty when the machine starts."""
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Of one machine. first_id, last_id: the numbers that are for jobs, by default some that no convention gives away.

    A limit of 0 is none.
    """

    user: Literal["own", "service"] = "own"
    first_id: int = 60578
    last_id: int = 61183
    max_open_files: int = 65536
    max_processes: int = 16384
    max_memory_bytes: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Policy:
        """Raises EverstepError."""
        default = cls()
        user = environ.get(f"{VARIABLES}USER", "own")
        if user not in ("own", "service"):
            raise EverstepError(f"{VARIABLES}USER is {user!r}; it must be own or service")
        ids = environ.get(f"{VARIABLES}USER_IDS", f"{default.first_id}-{default.last_id}")
        found = _RANGE.fullmatch(ids)
        if found is None or not 0 < int(found[1]) <= int(found[2]):
            raise EverstepError(f"{VARIABLES}USER_IDS is {ids!r}; it must be two numbers above 0, such as 60578-61183")
        return cls(
            user="own" if user == "own" else "service",
            first_id=int(found[1]),
            last_id=int(found[2]),
            max_open_files=_whole(environ, "MAX_OPEN_FILES", default.max_open_files),
            max_processes=_whole(environ, "MAX_PROCESSES", default.max_processes),
            max_memory_bytes=_whole(environ, "MAX_MEMORY_GIB", 0) << 30,
        )


class Lodging:
    """One host's of a job, from its arrival until `leave`. Raises EverstepError, OSError.

    key: alike for all hosts of that job here. Nodes that are emulated have one: ranks beside each other share memory.
    """

    def __init__(self, policy: Policy, job: str, reads: tuple[str, ...] = (), *, key: str = "") -> None:
        is_apart = policy.user == "own" and os.geteuid() == 0
        self._number = _take_number(policy, key or job) if is_apart else None
        try:
            user = self._number.user if self._number else 0
            self._home = private_tmp.make(job, os.getpid())
            if user:
                os.chown(self._home, user, user)
        except OSError:
            self._let_go()
            raise
        self.cell = Cell(
            user=user,
            home=str(self._home),
            reads=reads,
            max_open_files=policy.max_open_files,
            max_processes=policy.max_processes,
            max_memory_bytes=policy.max_memory_bytes,
        )

    def leave(self) -> None:
        """With the last one whatever is left of the job ends, wherever it went to. Blocks for some milliseconds."""
        self._let_go()
        private_tmp.remove(self._home)

    def _let_go(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            if number.is_ours_alone():
                _end_all_of(number.user)
            os.close(number.held)


@contextmanager
def lodged(policy: Policy, job: str, reads: tuple[str, ...] = ()) -> Iterator[Cell]:
    """For a process that is waited for."""
    lodging = Lodging(policy, job, reads)
    try:
        yield lodging.cell
    finally:
        lodging.leave()


def _end_all_of(user: int) -> None:
    """By a process of that user's: it may end its own and nobody else's, and is not ended by itself."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["/bin/sh", "-c", "kill -9 -1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            user=user,
            group=user,
            extra_groups=(),
            timeout=_END_S,
            check=False,
        )


@dataclass(frozen=True, slots=True)
class _Number:
    """held: the file that says whose it is, locked by each host of that job."""

    user: int
    held: int

    def is_ours_alone(self) -> bool:
        return _locks(self.held, fcntl.LOCK_EX)


def _take_number(policy: Policy, key: str) -> _Number:
    """One that no other job has. The same for a job again, where it can be."""
    try:
        USERS.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        said = f"{USERS} cannot be made ({error.strerror}); make it root's, or set jobs.user to service"
        raise EverstepError(said) from error
    count = policy.last_id - policy.first_id + 1
    mark = hashlib.sha256(key.encode()).digest()
    begin = int.from_bytes(mark[:8], "big")
    for step in range(count):
        user = policy.first_id + (begin + step) % count
        fd = os.open(USERS / str(user), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _locks(fd, fcntl.LOCK_EX):
            _end_all_of(user)  # what a host that was killed had left to itself
            os.pwrite(fd, mark, 0)
        # For all of one job. Between the two locks it is nobody's, so whose it is now is read last.
        if _locks(fd, fcntl.LOCK_SH) and os.pread(fd, len(mark), 0) == mark:
            return _Number(user, fd)
        os.close(fd)
    raise EverstepError(
        f"all {count} numbers of jobs.user_ids ({policy.first_id}-{policy.last_id}) are taken by jobs on this machine; "
        "give it a wider range"
    )


def _locks(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    said = environ.get(f"{VARIABLES}{name}", "").strip()
    if not said:
        return default
    if not said.isdecimal():
        raise EverstepError(f"{VARIABLES}{name} is {said!r}; it must be a whole number, 0 for no limit")
    return int(said)
