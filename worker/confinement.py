"""What a process that runs a job's code makes of itself first: another user, with less in reach and within limits.

A closed folder above something it needs (an interpreter in a home folder, checkpoints in a state directory of 0700) is
covered, in a view of its own of the file system, by an empty one in which that alone is found. Nothing on the disk changes,
and nobody else sees it. It owns these first steps; it refuses to know who decided them (lodging.py) and what runs next.

    closed /root ──> covered in this process's view ──> /root/.pyenv/versions/3.11 put back ──> another user, for good
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.domain.errors import EverstepError

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_COVER = b"mode=0755,size=1m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """user: its number and its group's, 0 for whoever starts the process. home: its folder for temporary files.

    reads: what it needs besides the interpreter and its modules. A limit of 0 is none.
    """

    user: int = 0
    home: str = ""
    reads: tuple[str, ...] = ()
    max_open_files: int = 0
    max_processes: int = 0
    max_memory_bytes: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """What libraries ask for who they run as and where they may write."""
        found = {"TMPDIR": self.home} if self.home else {}
        if not self.user:
            return found
        kept = {f"XDG_{name}_HOME": f"{self.home}/.{name.lower()}" for name in ("CACHE", "CONFIG", "DATA", "STATE")}
        return {**found, **kept, "HOME": self.home, "USER": "everstep", "LOGNAME": "everstep"}

    @property
    def is_apart(self) -> bool:
        """Whether it is another user than whoever starts it."""
        return self.user != 0


def enter(cell: Cell) -> None:
    """For good, also for whatever is started from here. Raises EverstepError where something it needs stays closed to it.

    Clears the signal of a parent's death; call before there is a second thread.
    """
    _limit(resource.RLIMIT_NOFILE, cell.max_open_files)
    _limit(resource.RLIMIT_DATA, cell.max_memory_bytes)
    _limit(resource.RLIMIT_CORE, 0, is_limit=True)
    if cell.is_apart:
        _limit(resource.RLIMIT_NPROC, cell.max_processes)  # of a user: of one that nobody else is
        _open_ways(_needed(cell), cell.user)
        here = _here(cell.home)
        os.setgroups(())
        os.setresgid(cell.user, cell.user, cell.user)
        os.setresuid(cell.user, cell.user, cell.user)
        # Else its own files under /proc would be root's, which is for programs that were root's themselves.
        _call(_LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "to be looked at by its own user")
        try:
            os.chdir(here)  # by name: not what lies under a cover
        except OSError:
            os.chdir(cell.home)
    # Neither su nor a file's set-user-id bit makes more of it again.
    _call(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "to gain nothing by what it starts")


def may_show_views() -> bool:
    """Whether this process, which must be root, has the right to give those it starts another view of the file system."""
    pid = os.fork()
    if pid == 0:
        done = _LIBC.unshare(_CLONE_NEWNS) == 0 and _LIBC.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) == 0
        os._exit(not done)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def closed_to(user: int, paths: Iterable[str]) -> list[str]:
    """Those that are there and whose own mode shuts this user out."""
    return [path for path in paths if (found := _mode(path)) is not None and not _may_read(found, user)]


def _here(otherwise: str) -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it has been removed
        return otherwise


def _limit(kind: int, value: int, *, is_limit: bool = False) -> None:
    if not value and not is_limit:
        return
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _needed(cell: Cell) -> list[str]:
    """Absolute, as they are called and where they lie; what contains others before these."""
    named = [*sys.path, sys.prefix, sys.base_prefix, cell.home, *cell.reads]
    absolute = {str(Path(one).absolute()) for one in named if one}
    both = absolute | {os.path.realpath(one) for one in absolute}
    return sorted(one for one in both if Path(one).exists())


def _open_ways(paths: Sequence[str], user: int) -> None:
    """Let this user get to each, though not further than its own mode allows."""
    if not any(_closed_above(path, user) for path in paths):
        return
    _own_view(next((path, closed) for path in paths if (closed := _closed_above(path, user))), user)
    held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}
    try:
        # What was put back may have a closed folder further down.
        while tops := {found for path in paths if (found := _closed_above(path, user))}:
            top = min(tops)
            _mount(b"everstep", top, b"tmpfs", _MS_NOSUID | _MS_NODEV, _COVER)
            for path in paths:
                if path.startswith(f"{top}/") and not os.path.lexists(path):
                    _put_back(path, held[path])
    finally:
        for fd in held.values():
            os.close(fd)


def _own_view(example: tuple[str, str], user: int) -> None:
    """This process's mounts are its own from here on, and those that others make later are seen here, too."""
    if _LIBC.unshare(_CLONE_NEWNS) != 0:
        path, closed = example
        raise EverstepError(
            f"jobs run as user {user} here, who needs {path} and may not enter {closed}, and this process has no right to "
            f"show it another way (CAP_SYS_ADMIN); chmod a+x {closed}, put that elsewhere, or set jobs.user to service"
        )
    _mount(b"none", "/", None, _MS_REC | _MS_SLAVE, None)


def _put_back(path: str, fd: int) -> None:
    at = Path(path)
    before = os.umask(0o022)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            at.mkdir(parents=True)
        else:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.touch()
    finally:
        os.umask(before)
    _mount(f"/proc/self/fd/{fd}".encode(), path, None, _MS_BIND | _MS_REC, None)


def _closed_above(path: str, user: int) -> str:
    """The first folder on the way to it that this user may not enter; "" where there is none."""
    for folder in reversed(Path(path).parents):
        found = _mode(str(folder))
        if found is not None and not _may_enter(found, user):
            return str(folder)
    return ""


def _mode(path: str) -> os.stat_result | None:
    with suppress(OSError):
        return Path(path).stat()
    return None


def _may_enter(found: os.stat_result, user: int) -> bool:
    return bool(found.st_mode & (stat.S_IXUSR if found.st_uid == user else stat.S_IXOTH))


def _may_read(found: os.stat_result, user: int) -> bool:
    is_own = found.st_uid == user
    wanted = stat.S_IRUSR if is_own else stat.S_IROTH
    if stat.S_ISDIR(found.st_mode):
        wanted |= stat.S_IXUSR if is_own else stat.S_IXOTH
    return found.st_mode & wanted == wanted


def _mount(source: bytes, target: str, kind: bytes | None, flags: int, data: bytes | None) -> None:
    _call(_LIBC.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), data), f"to have {target} in its own view")


def _call(result: int, what: str) -> None:
    if result != 0:
        why = os.strerror(ctypes.get_errno())
        raise EverstepError(f"a job's process was refused {what} ({why}); set jobs.user to service where that must be")
