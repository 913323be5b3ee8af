"""A job's folder of checkpoints: which are committed, which of them stay, and which packs go with those that don't.

It owns the order of removal: a manifest first, its directory then, and packs only when no manifest names them any more. It
decides by names, manifests and sizes, and never reads tensor data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..domain.checkpoint import CheckpointRef
from ..domain.ids import Generation, Step
from . import index as indexes
from .durable import DISK, Disk, remove_tree
from .index import PACKS, CheckpointAway, CheckpointCorrupt, CheckpointTooNew, Index
from .places import place
from .sealed import MANIFEST, Manifest, load_chain, load_manifest, named, reference

_PACK = re.compile(r"(\d{8,})\.g(\d+)(?:\.\d+)?\.pack")


def latest(directory: Path) -> CheckpointRef | None:
    """The newest checkpoint whose manifest, indexes and packs are all there; tensor data is checked when read.

    Raises CheckpointTooNew where a newer version wrote the newest one, CheckpointAway where nobody can tell.
    """
    return next(committed(directory), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """What retention leaves, and what it does not. packs: files that nobody names once the directories are gone."""

    kept: tuple[Path, ...]
    older: tuple[Path, ...]
    unfinished: tuple[Path, ...]
    packs: tuple[Path, ...]


def going(directory: Path, keep_last: int) -> Going:
    """All but the newest `keep_last` checkpoints (never the newest) with what they are read through;
    unfinished ones older than the newest; and the packs of those. Nothing where no checkpoint is whole: anything may be the
    last copy then.

    Raises CheckpointTooNew where a newer version wrote one, CheckpointAway where one cannot be reached: nobody knows here
    what that one is read from.
    """
    refs = list(committed(directory, is_sure=True))
    if not refs:
        return Going(kept=(), older=(), unfinished=(), packs=())
    known = {place(ref.path).name: load_manifest(place(ref.path)) for ref in refs}
    kept: dict[str, Manifest] = {}
    for ref in refs[: max(1, keep_last)]:
        kept |= {name: known[name] for name in chain_of(place(ref.path).name, known)}
    newest = (refs[0].generation, refs[0].step)
    others = [(generation, step, path) for step, generation, path in candidates(directory) if path.name not in kept]
    return Going(
        kept=tuple(directory / name for name in kept),
        older=tuple(path for _, _, path in others if path.name in known),
        unfinished=tuple(path for *of, path in others if path.name not in known and tuple(of) < newest),
        packs=unnamed(directory, named_packs(kept.values()), newest),
    )


def prune(directory: Path, keep_last: int, disk: Disk = DISK) -> tuple[Path, ...]:
    """Remove what is going, at once: only where nothing is being saved. Returns the directories removed.

    What cannot be removed is left for next time.
    """
    try:
        found = going(directory, keep_last)
    except (CheckpointTooNew, CheckpointAway):
        return ()
    removed = []
    for path in (*found.older, *found.unfinished):
        try:
            disk.unlink(path / MANIFEST)  # first, so that half a directory is never taken for a checkpoint
            disk.sync_directory(path)
            remove_tree(path, disk)
        except OSError:
            continue
        removed.append(path)
    if removed:
        disk.sync_directory(directory)  # before the packs go: no manifest may come back that names one
    try:
        named = named_packs(remaining(directory).values()) if found.packs else frozenset()
    except CheckpointAway:
        return tuple(removed)
    for pack in found.packs:
        if f"{pack.parent.name}/{pack.name}" not in named:
            with suppress(OSError):
                disk.unlink(pack)
    return tuple(removed)


def named_packs(manifests: Iterable[Manifest]) -> frozenset[str]:
    """The packs that any of these checkpoints is read from."""
    return frozenset(pack for manifest in manifests for pack in manifest.packs)


def live_shares(parts: Iterable[Index]) -> dict[str, float]:
    """Each pack these indexes name -> how much of its bytes they name, 0..1."""
    sizes: dict[str, int] = {}
    live: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    for part in parts:
        sizes |= part.packs
        for piece in part.pieces:
            if (piece.pack, piece.offset) not in seen:
                seen.add((piece.pack, piece.offset))
                live[piece.pack] += piece.length
    return {pack: live[pack] / size if size else 1.0 for pack, size in sizes.items()}


def chain_of(name: str, known: Mapping[str, Manifest]) -> tuple[str, ...]:
    """The directories that the checkpoint `name` is read from, its own first, its base last: as far as they are known."""
    chain = [name]
    while (parent := known[chain[-1]].parent) is not None and parent.name in known:
        chain.append(parent.name)
    return tuple(chain)


def committed(directory: Path, *, is_sure: bool = False) -> Iterator[CheckpointRef]:
    """Newest first. Raises CheckpointTooNew, CheckpointAway where it comes to such a one.

    is_sure: also where a disk has failed to read one, which may be whole.
    """
    loaded: dict[Path, Manifest] = {}
    whole: set[Path] = set()
    for step, generation, path in candidates(directory):
        try:
            chain = load_chain(path, loaded)
            for at, manifest in chain:
                if at not in whole:
                    indexes.check_packs(at, manifest.packs)
                    for shard in manifest.shards:
                        indexes.check(at, shard)
                    whole.add(at)
        except (CheckpointTooNew, CheckpointAway):
            raise
        except CheckpointCorrupt as error:
            if is_sure:
                _require_gone(error)
            continue
        manifest = chain[-1][1]
        if (manifest.step, manifest.generation) == (step, generation):
            yield reference(path, manifest)


def is_here(directory: Path) -> bool:
    """Whether any checkpoint can be in it: false for the empty folder that a disk which is not mounted leaves behind."""
    try:
        return (directory / PACKS).is_dir() and bool(list(directory.iterdir()))
    except OSError:
        return False


def candidates(directory: Path) -> list[tuple[Step, Generation, Path]]:
    """Directories named like checkpoints, newest first: a later generation may have been rolled back to an earlier step.

    Raises CheckpointAway where they cannot be listed, other than because there is no such folder.
    """
    try:
        found = [(*of, path) for path in directory.iterdir() if (of := named(path)) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointAway(f"{directory} cannot be listed: {error}; bring its storage back") from error
    return sorted(found, key=lambda one: (one[1], one[0]), reverse=True)


def remaining(directory: Path) -> dict[str, Manifest]:
    """Directory name -> manifest of every checkpoint still there, also of one that should have gone and could not.

    Raises CheckpointTooNew, CheckpointAway: then nobody knows which packs are needed.
    """
    found = {}
    for _, _, path in candidates(directory):
        try:
            found[path.name] = load_manifest(path)
        except (CheckpointTooNew, CheckpointAway):
            raise
        except CheckpointCorrupt as error:  # nothing is read through what is damaged or unfinished
            _require_gone(error)
    return found


def _require_gone(error: CheckpointCorrupt) -> None:
    """Raises CheckpointAway where a disk would not say, which it may do the next time."""
    if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
        raise CheckpointAway(f"{error}; nothing is removed until it is known what is in it") from error


def unnamed(directory: Path, named: frozenset[str], newest: tuple[Generation, Step]) -> tuple[Path, ...]:
    """The packs that nobody names. Those as new as the newest checkpoint and newer may be named any moment."""
    found = []
    for pack in sorted((directory / PACKS).glob("*/*")):
        match, name = _PACK.fullmatch(pack.name), f"{pack.parent.name}/{pack.name}"
        if match and indexes.is_pack_name(name) and (int(match[2]), int(match[1])) < newest and name not in named:
            found.append(pack)
    return tuple(found)
