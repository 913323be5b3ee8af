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

from .places import Remote, Upload

Bytes: TypeAlias = bytes | bytearray | memoryview
Handle: TypeAlias = int | Upload
"""Of what is being written: a descriptor, or an object on its way."""


class Disk:
    """The calls, one each. All raise OSError."""

    def make_directory(self, path: Path) -> None:
        """One level; its parent is there, itself it may be there already."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> Handle:
        """For writing a file that is not there yet. Raises FileExistsError."""
        if isinstance(path, Remote):
            return path.create()
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, handle: Handle, content: Bytes) -> None:
        if isinstance(handle, Upload):
            handle.write(content)
            return
        left = memoryview(content)
        while left:
            left = left[os.write(handle, left) :]

    def sync(self, handle: Handle) -> None:
        """What has been written is durable; of an object nothing can follow."""
        if isinstance(handle, Upload):
            handle.commit()
        else:
            os.fsync(handle)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def replace_object(self, path: Remote, content: Bytes) -> None:
        """The whole of an object, which is what it was or this."""
        path.write_bytes(content)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        if isinstance(path, Remote):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()


def close(handle: Handle) -> None:
    """Nothing more is written; an object that was not synced will not be."""
    if isinstance(handle, Upload):
        handle.close()
    else:
        os.close(handle)


def make_directories(path: Path, disk: Disk = DISK) -> None:
    """`path` and what is missing above it; each new name is on disk when this returns."""
    if isinstance(path, Remote):
        return  # there are none
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
        close(descriptor)
    disk.sync_directory(file.parent)


def write_durably(file: Path, content: Bytes, disk: Disk = DISK) -> None:
    """`file` is what it was or is `content`, at any moment and after any crash."""
    if isinstance(file, Remote):
        disk.replace_object(file, content)
        return
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
    if isinstance(directory, Remote):
        directory.remove_all()
        return
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path, disk)
        else:
            disk.unlink(path)
    disk.remove_directory(directory)
