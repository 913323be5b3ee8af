"""Disks that fail: at any one call the process ends, or the call is refused, or the power goes with what was not synced."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.adapters.durable import Bytes, Disk, Handle
from orchestrator.adapters.places import Remote


class Cut(BaseException):
    """The process has ended: nothing that it would do on an error is done."""


class Traced(Disk):
    """Calls are counted; `at` each one may stop it. Nothing is done differently."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def at(self, call: str, descriptor: Handle | None = None, content: Bytes = b"") -> None:
        self.calls.append(call)

    def make_directory(self, path: Path) -> None:
        self.at("make_directory")
        super().make_directory(path)

    def create(self, path: Path) -> Handle:
        self.at("create")
        return super().create(path)

    def write(self, descriptor: Handle, content: Bytes) -> None:
        self.at("write", descriptor, content)
        super().write(descriptor, content)

    def sync(self, descriptor: Handle) -> None:
        self.at("sync")  # and no more: this disk's power does not go

    def rename(self, old: Path, new: Path) -> None:
        self.at("rename")
        super().rename(old, new)

    def replace_object(self, path: Remote, content: Bytes) -> None:
        self.at("replace_object")
        super().replace_object(path, content)

    def unlink(self, path: Path) -> None:
        self.at("unlink")
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self.at("remove_directory")
        super().remove_directory(path)

    def sync_directory(self, path: Path) -> None:
        self.at("sync_directory")


class Killed(Traced):
    """The process ends in front of a call, or in the middle of a write."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def at(self, call: str, descriptor: Handle | None = None, content: Bytes = b"") -> None:
        super().at(call)
        if len(self.calls) == self._number:
            if isinstance(descriptor, int):
                os.write(descriptor, memoryview(content)[: len(content) // 2])
            raise Cut(call)


class Refusing(Traced):
    """From one call on, every call of these names is refused, as a full or a read-only disk does."""

    def __init__(self, number: int, *names: str, code: int = errno.ENOSPC) -> None:
        super().__init__()
        self.number = number
        self._names = names
        self._code = code

    def at(self, call: str, descriptor: Handle | None = None, content: Bytes = b"") -> None:
        super().at(call)
        if len(self.calls) >= self.number and call in self._names:
            if isinstance(descriptor, int):
                os.write(descriptor, memoryview(content)[: len(content) // 2])
            raise OSError(self._code, os.strerror(self._code))


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


class Powerless(Traced):
    """What would be on disk had the power gone: of what no sync covers, any part may be there and any may not.

    It begins with all that is below `root`, on disk.
    """

    def __init__(self, root: Path, number: int) -> None:
        super().__init__()
        self._number = number
        self._live: dict[Path, _File | None] = {}
        """Path -> file, None for directories."""
        for path in sorted(root.rglob("*")):
            content = bytearray() if path.is_dir() else bytearray(path.read_bytes())
            self._live[path] = None if path.is_dir() else _File(content, bytes(content))
        self._synced = dict(self._live)
        self._open: dict[Handle, _File] = {}

    def at(self, call: str, descriptor: Handle | None = None, content: Bytes = b"") -> None:
        super().at(call)
        if len(self.calls) == self._number:
            raise Cut(call)

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._live.setdefault(path, None)

    def create(self, path: Path) -> Handle:
        descriptor = super().create(path)
        self._live[path] = self._open[descriptor] = _File()
        return descriptor

    def write(self, descriptor: Handle, content: Bytes) -> None:
        super().write(descriptor, content)
        self._open[descriptor].content += content

    def sync(self, descriptor: Handle) -> None:
        super().sync(descriptor)
        self._open[descriptor].synced = bytes(self._open[descriptor].content)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._live[new] = self._live.pop(old)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._live.pop(path, None)

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        del self._live[path]

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        entries = {name: file for name, file in self._live.items() if name.parent == path}
        self._synced = {name: file for name, file in self._synced.items() if name.parent != path} | entries

    def leave(self, old: Path, new: Path, rng: random.Random) -> None:
        """Make in `new` what the disk has of `old`."""
        entries = dict(self._synced)
        for name in sorted({*self._live, *self._synced}):
            if self._live.get(name, 0) is not self._synced.get(name, 0) and rng.random() < 0.5:
                if name in self._live:
                    entries[name] = self._live[name]
                else:
                    entries.pop(name)
        new.mkdir(parents=True)
        for name in sorted(entries):
            target, file = new / name.relative_to(old), entries[name]
            if not target.parent.is_dir():
                continue
            if file is None:
                target.mkdir(exist_ok=True)
            else:
                most = len(file.content)
                kept = file.synced if file.synced else bytes(file.content[: rng.randint(0, most)])
                target.write_bytes(kept)
