"""Files that are there after a crash: every call by which a checkpoint comes to be or goes away, and no other.

It owns the order that makes a file durable (write, fsync, fsync of every directory that gained a name). It refuses to know
what is in the files. Tests put a `Disk` of their own in its place and end the process, or the power, at any of the calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview


class Disk:
    """The calls, one each. All raise OSError."""

    def make_directory(self, path: Path) -> None:
        """One level; its parent is there, itself it may be there already."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """A descriptor for writing a file that is not there yet. Raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, content: Bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()


def make_directories(path: Path, disk: Disk = DISK) -> None:
    """`path` and what is missing above it; each new name is on disk when this returns."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        disk.make_directory(directory)
        disk.sync_directory(directory.parent)


def write_new(file: Path, contents: Iterable[Bytes], disk: Disk = DISK) -> None:
    """A file that was not there, on disk when this returns. Raises FileExistsError.

    Half of it may stay where this raises or the process ends: nothing may refer to a file before this has returned.
    """
    descriptor = disk.create(file)
    try:
        for content in contents:
            disk.write(descriptor, content)
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
    disk.sync_directory(file.parent)


def write_durably(file: Path, content: Bytes, disk: Disk = DISK) -> None:
    """`file` is what it was or is `content`, at any moment and after any crash."""
    # Two supervisors may write the same file at once, and one of an earlier life may have left its draft.
    draft = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    disk.unlink(draft)
    try:
        write_new(draft, (content,), disk)
        disk.rename(draft, file)
    except OSError:
        with suppress(OSError):
            disk.unlink(draft)
        raise
    disk.sync_directory(file.parent)


def remove_tree(directory: Path, disk: Disk = DISK) -> None:
    """A directory and all in it. What is in it is no more than two levels deep."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path, disk)
        else:
            disk.unlink(path)
    disk.remove_directory(directory)
