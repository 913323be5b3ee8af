"""A tier: somewhere that holds copies of packs beside the shared folder, which alone decides what is saved.

    the node's own disk ──> shared storage     a piece is read from the nearest that has it as it was written

Reached through fsspec, so a tier is a folder or whatever else that knows. Nothing in one counts for anything: each piece
is checked where it is read, and what cannot be written there, or is gone, is done without. It knows packs and bytes alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.adapters.index import PACKS, own_folder
from orchestrator.domain.ids import NodeId

from .packs import read_into

LEFT_S = 7 * 24 * 3600.0
"""After which copies that nobody adds to are taken for those of a job that is gone."""


class Tier:
    """name: for people, as in "from n3's disk". url: a folder, or anything that fsspec opens."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self.bad: list[str] = []
        """What was found damaged or could not be read, in words."""
        self.num_read = 0
        """Bytes that came from here."""

    def create(self, pack: str) -> Any:
        """A file to write a pack to; what is written is there once it is closed. Raises OSError."""
        path = self._path(pack)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return self._fs.open(path, "wb")

    def open(self, pack: str) -> Opened | None:
        """None where it is not here, or nobody knows."""
        path = self._path(pack)
        try:
            if "file" in self._protocols:
                return Opened(self._fs.open(path, "rb", buffering=0))
            return Opened(None, self._fs, path) if self._fs.exists(path) else None
        except OSError:
            return None

    def size(self, pack: str) -> int | None:
        with suppress(OSError):
            return int(self._fs.size(self._path(pack)))
        return None

    def remove(self, pack: str) -> None:
        with suppress(OSError):
            self._fs.rm_file(self._path(pack))

    def packs(self, stem: str) -> list[str]:
        """Those of one device."""
        try:
            found = self._fs.ls(self._path(stem), detail=False)
        except OSError:
            return []
        return [f"{stem}/{path.rpartition('/')[2]}" for path in found]

    @property
    def _protocols(self) -> Collection[str]:
        told = self._fs.protocol
        return (told,) if isinstance(told, str) else told

    def _path(self, pack: str) -> str:
        return f"{self._root}/{PACKS}/{pack}"


class Opened:
    """A pack that is open for reading, by any number of threads."""

    def __init__(self, file: Any, fs: Any = None, path: str = "") -> None:
        self._file = file
        self._fs = fs
        self._path = path

    def read_into(self, room: NDArray[np.uint8], offset: int) -> None:
        """Raises OSError, also where it ends before."""
        if self._file is not None:
            read_into(self._file.fileno(), room, offset)
            return
        content = self._fs.cat_file(self._path, start=offset, end=offset + room.size)
        if len(content) != room.size:
            raise OSError(f"it ends {room.size - len(content)} bytes early")
        room[:] = np.frombuffer(content, dtype=np.uint8)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def own_disk(local: str, node: NodeId, root: Path) -> Tier | None:
    """The tier of a node for the checkpoints in `root`; None where the job has none. local: the job's checkpoint.local."""
    return Tier(f"{node}'s disk", str(own_folder(local, node, root))) if local else None


def sweep_left(mine: Path, now: float) -> tuple[Path, ...]:
    """Remove what other jobs left on this node's disk, beside `mine`, and nobody has written to for LEFT_S.

    A host that is closed removes its own; one that died may never have come back. now: wall clock. Where such a job still
    runs it loses copies alone, and reads shared storage.
    """
    removed = []
    with suppress(OSError):
        for folder in sorted(mine.parent.iterdir()):
            if folder != mine and folder.is_dir() and _newest(folder) < now - LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return tuple(removed)


def _newest(folder: Path) -> float:
    """When anything in it was last written; OSError where it is going just now."""
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))


class Copier:
    """Puts a second copy of each pack that one device writes into its node's tier, and forgets those nobody would read."""

    def __init__(self, tier: Tier, stem: str) -> None:
        self._tier = tier
        self._stem = stem
        self._named: frozenset[str] = frozenset()
        self._pack = ""
        self._file: Any = None
        self._failed = ""

    def write(self, pack: str, content: bytes | memoryview) -> None:
        """More of a pack; the first of it makes it. Once it has failed the rest of that pack is dropped."""
        if self._failed == pack:
            return
        try:
            if self._pack != pack:
                self._pack, self._file = pack, self._tier.create(pack)
            self._file.write(content)
        except OSError as error:
            self._give_up(pack, error)

    def finish(self, pack: str, *, keep: bool) -> None:
        """Nothing more of it comes. keep: it is part of a checkpoint."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._give_up(pack, error)
        if not keep and self._pack == pack:
            self._tier.remove(pack)
        self._pack = ""

    def holds(self, packs: Collection[str]) -> bool:
        """All of them, as far as can be told without reading."""
        return all(self._tier.size(pack) is not None for pack in packs)

    def trim(self, named: Collection[str]) -> None:
        """named: what the newest state is read from. What that and the one before are not read from goes."""
        kept, self._named = self._named | set(named), frozenset(named)
        for pack in self._tier.packs(self._stem):
            if pack not in kept:
                self._tier.remove(pack)

    def _give_up(self, pack: str, error: OSError) -> None:
        print(f"no copy of {pack} on {self._tier.name}: {error}; it is on shared storage alone", flush=True)
        self._failed, file, self._file = pack, self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()
        self._tier.remove(pack)
