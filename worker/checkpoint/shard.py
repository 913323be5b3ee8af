"""Writing one device's share of a checkpoint: what is new goes into one pack, everything is named in one index.

It remembers what its last save named, so that content which is stored already is only referred to; where it remembers
nothing it learns it from the newest committed checkpoint. It refuses to know when to save and what becomes of it then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.adapters import index as indexes
from orchestrator.adapters import manifest
from orchestrator.adapters.durable import DISK, Disk, Handle, close, make_directories, write_new
from orchestrator.adapters.index import PACKS, STATE, Index, IndexedPiece
from orchestrator.adapters.places import place
from orchestrator.adapters.sweeping import condemned_packs
from orchestrator.domain.checkpoint import ShardRef
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.profile import Profile

from .coding import PAYS, PAYS_ONCE, Coder, Coding, digest
from .format import chunks
from .packs import read_stored
from .snapshot import Snapshot
from .tier import Copier, Tier

CHOSEN_FOR = 16
"""Saves after which the coding of each line is chosen again: what training does to it changes slowly."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where content is stored. is_proven: this process wrote it, or has read it again."""

    pack: str
    offset: int
    length: int
    coding: str
    stored: str
    is_proven: bool


class ShardWriter:
    """root: the job's folder of checkpoints. One thread at a time; any number of them in a process, for other devices."""

    def __init__(self, root: Path, profile: Profile, device: Device, disk: Disk = DISK, near: Tier | None = None) -> None:
        self._root = root
        self._device = device
        self._disk = disk
        self._lines = {line.name: line.numel for line in profile.lines}
        self._stem = indexes.file_stem(device)
        self._copier = Copier(near, self._stem) if near else None
        self._coder = Coder()
        self._codings: dict[tuple[str, str], Coding] = {}
        self._saves = 0
        self._generation: Generation | None = None
        self._known: dict[str, _Place] = {}
        """Content -> where it is stored."""
        self._sizes: dict[str, int] = {}
        """Of each pack that a known place is in."""

    def write(
        self,
        snapshot: Snapshot,
        condemned: frozenset[str] = frozenset(),
        progress: Callable[[int], None] = lambda done: None,
    ) -> ShardRef:
        """A pack and its index, durable when this returns. condemned: packs that are about to go, beside those that
        the folder lists. progress: takes how many bytes of the state have been dealt with. Raises OSError.

        The state is read piece by piece, where it is: it must not change before this returns.
        """
        self._recall(snapshot.generation, condemned | condemned_packs(self._root))
        if self._saves % CHOSEN_FOR == 0:
            self._codings.clear()
        self._saves += 1
        directory = self._root / manifest.directory_name(snapshot.step, snapshot.generation)
        make_directories(directory, self._disk)
        make_directories(self._root / PACKS / self._stem, self._disk)
        attempt = self._attempt(snapshot, directory)
        pack = _Pack(
            self._root, indexes.pack_name(self._stem, snapshot.step, snapshot.generation, attempt), self._disk, self._copier
        )
        file = directory / indexes.index_name(self._stem, attempt)
        try:
            places = self._store(snapshot, pack, progress)
            pack.finish()
            content = indexes.encode(self._index(snapshot, pack, places))
            write_new(file, (content,), self._disk)
        except OSError:
            pack.discard()
            with suppress(OSError):
                self._disk.unlink(file)
            raise
        named = {place.pack for _, place in places}
        is_local = self._copier is not None and self._copier.holds(named)
        if self._copier is not None and snapshot.kinds == STATE:
            self._copier.trim(named)
        if snapshot.kinds == STATE:  # no gradient comes twice, and the next state resembles the last one
            self._known = {piece.content: place for piece, place in places}
            self._sizes = _sizes(pack, places, self._sizes)
        sha256 = hashlib.sha256(content).hexdigest()
        return ShardRef(device=self._device, index=file.name, sha256=sha256, is_local=is_local)

    # --- what is stored already -----------------------------------------------------------------------------------------

    def _recall(self, generation: Generation, condemned: frozenset[str]) -> None:
        """Know only what may be referred to.

        In a new generation that is what is committed: what this process saved for the last one may be no part of any
        checkpoint, and where a bad piece made the job go back, it must be found bad here as well.
        """
        if generation != self._generation:
            self._known, self._sizes = _committed(self._root)
            self._generation = generation
        here = {
            name for name, size in self._sizes.items() if name not in condemned and _size(self._root / PACKS / name) == size
        }
        if len(here) < len(self._sizes):
            self._known = {content: place for content, place in self._known.items() if place.pack in here}
            self._sizes = {name: size for name, size in self._sizes.items() if name in here}

    def _found(self, content: str, num_bytes: int) -> _Place | None:
        """Where it is stored already; what another process wrote is read again first."""
        place = self._known.get(content)
        if place is None or place.is_proven:
            return place
        room = np.empty(num_bytes, dtype=np.uint8)
        try:
            stored = read_stored(self._root / PACKS / place.pack, place.offset, place.length)
            self._coder.decode(place.coding, stored, room)
        except (OSError, ValueError):
            return None
        if digest(stored.data) != place.stored or digest(room.data) != content:
            return None
        return replace(place, is_proven=True)

    # --- what is new ----------------------------------------------------------------------------------------------------

    def _store(self, snapshot: Snapshot, pack: _Pack, progress: Callable[[int], None]) -> list[tuple[IndexedPiece, _Place]]:
        done = 0
        found: list[tuple[IndexedPiece, _Place]] = []
        fresh: dict[str, _Place] = {}
        for row, kind in enumerate(snapshot.kinds):
            elements = snapshot.state[row].view(np.uint8)
            for piece in snapshot.pieces:
                for interval in chunks(piece.interval):
                    low = piece.offset + interval.start - piece.interval.start
                    content = elements[low * 4 : (low + len(interval)) * 4]
                    hashed = digest(content.data)
                    place = fresh.get(hashed) or self._found(hashed, content.size)
                    if place is None:
                        place = self._add(pack, interval.line, kind, content, hashed)
                    fresh[hashed] = place
                    found.append((_indexed(interval.line, kind, interval.start, interval.stop, hashed, place), place))
                    done += content.size
                    progress(done)
        return found

    def _add(self, pack: _Pack, line: str, kind: str, content: NDArray[np.uint8], hashed: str) -> _Place:
        coding = self._codings.get((line, kind))
        if coding is None:
            coding = self._codings[line, kind] = self._coder.choose(content, PAYS if kind in STATE else PAYS_ONCE)
        name, stored = self._coder.encode(content, coding)
        offset = pack.append(stored)
        return _Place(pack.name, offset, len(stored), name, hashed if name == indexes.RAW else digest(stored), True)

    def _attempt(self, snapshot: Snapshot, directory: Path) -> int:
        """Files are written once: where an earlier try left some, they may be part of a checkpoint, and others are made."""
        attempt = 0
        while (
            self._root / PACKS / indexes.pack_name(self._stem, snapshot.step, snapshot.generation, attempt)
        ).exists() or (directory / indexes.index_name(self._stem, attempt)).exists():
            attempt += 1
        return attempt

    def _index(self, snapshot: Snapshot, pack: _Pack, places: list[tuple[IndexedPiece, _Place]]) -> Index:
        return Index(
            device=self._device,
            step=snapshot.step,
            generation=snapshot.generation,
            answer=snapshot.answer,
            kinds=snapshot.kinds,
            lines=self._lines,
            packs=_sizes(pack, places, self._sizes),
            new_bytes=pack.size,
            pieces=tuple(piece for piece, _ in places),
        )


class _Pack:
    """A file that is made when something goes into it."""

    def __init__(self, root: Path, name: str, disk: Disk, copier: Copier | None) -> None:
        self.name = name
        self._copier = copier
        self.size = 0
        self._path = root / PACKS / name
        self._disk = disk
        self._handle: Handle | None = None

    def append(self, content: bytes | memoryview) -> int:
        """Where it begins."""
        if self._handle is None:
            self._handle = self._disk.create(self._path)
        if self._copier is not None:  # the nearest first: it is the fastest
            self._copier.write(self.name, content)
        self._disk.write(self._handle, content)
        self.size += len(content)
        return self.size - len(content)

    def finish(self) -> None:
        """It is on disk when this returns."""
        if self._handle is not None:
            self._disk.sync(self._handle)
            self._close()
            self._disk.sync_directory(self._path.parent)
        if self._copier is not None:
            self._copier.finish(self.name, keep=True)

    def discard(self) -> None:
        """A full disk has no room for the half of a pack."""
        if self._copier is not None:
            self._copier.finish(self.name, keep=False)
        if self.size or self._handle is not None:
            self._close()
            with suppress(OSError):
                self._disk.unlink(self._path)

    def _close(self) -> None:
        if self._handle is not None:
            close(self._handle)
            self._handle = None


def _committed(root: Path) -> tuple[dict[str, _Place], dict[str, int]]:
    """What the newest checkpoint, of whatever devices, names: after a new layout other devices hold the same content."""
    known: dict[str, _Place] = {}
    sizes: dict[str, int] = {}
    try:
        newest = manifest.latest(root)
        if newest is not None:
            path, base = manifest.load_chain(place(newest.path))[0]
            for part in manifest.load_indexes(path, base):
                sizes |= part.packs
                for p in part.pieces:
                    known[p.content] = _Place(p.pack, p.offset, p.length, p.coding, p.stored, False)
    except manifest.CheckpointCorrupt:
        return {}, {}
    return known, sizes


def _sizes(pack: _Pack, places: list[tuple[IndexedPiece, _Place]], known: Mapping[str, int]) -> dict[str, int]:
    return {name: pack.size if name == pack.name else known[name] for name in sorted({place.pack for _, place in places})}


def _indexed(line: str, kind: str, start: int, stop: int, content: str, place: _Place) -> IndexedPiece:
    return IndexedPiece(
        line, kind, start, stop, place.pack, place.offset, place.length, place.coding, content, place.stored
    )


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None
