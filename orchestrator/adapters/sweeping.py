"""Making room in a job's folder of checkpoints, in an order that no crash, pause or second supervisor can turn into a loss.

    sweep    directories of checkpoints that are kept no longer ──> packs that nobody names, or little of which is named
    (the control plane records them as condemned)
    sweep    the list goes beside the packs: writers store again what they would find there
    commit   refuses what names a condemned pack, once writers have had time to learn of it
    sweep    those that were refused for long enough, and that nobody names, are deleted

No state is deleted that the control plane has not recorded as condemned before; a supervisor that was paused half way finds
that to be so. A journal entry's gradients are nobody else's, and go with it. It owns the steps on disk. It refuses to know
how long anything takes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..domain.ids import Generation, Step
from . import index as indexes
from .durable import DISK, Disk, remove_tree, write_durably
from .folder import candidates, chain_of, live_shares, named_packs, remaining, unnamed
from .index import PACKS, CheckpointCorrupt
from .sealed import MANIFEST, Manifest, named

CONDEMNED = "condemned.json"
WORN = 0.5
"""A pack of which less is still named is not worth its place: what is named is stored again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """removed: directories. condemnable: packs that should be condemned and are not yet. deleted: packs that are gone."""

    removed: tuple[Path, ...]
    condemnable: tuple[str, ...]
    deleted: tuple[str, ...]


def sweep(
    directory: Path,
    keep: Collection[Path],
    condemned: Collection[str] = (),
    doomed: Collection[str] = (),
    disk: Disk = DISK,
) -> Swept:
    """keep: the checkpoints to keep, with what they are read through; newer ones than all of them are not touched.

    condemned, doomed: packs that are recorded as condemned, and those of them that may be deleted. Raises CheckpointTooNew
    and CheckpointAway where somebody may need what nobody here can know of, and OSError where the list of condemned packs
    cannot be written; what cannot be removed is left for next time.
    """
    # What a job began with may lie in another job's folder, and its generation is no time of this one's.
    keep = [path for path in keep if path.parent == directory]
    newest = max((of for path in keep if (of := _of(path))), default=None)
    if newest is None:
        return Swept(removed=(), condemnable=(), deleted=())
    known = remaining(directory)
    names = {path.name for path in keep}
    kept = {name: known[name] for one in names & set(known) for name in chain_of(one, known)}
    # Nobody refers to a gradient but the entry it was saved for, so it goes with that at once.
    gradients = named_packs(one for name, one in known.items() if one.kind == "journal")
    # By name, too: whether a damaged one is given up is not decided here.
    removed = _remove(directory, names | set(kept), newest, disk)
    here = named_packs(remaining(directory).values())
    deleted = _delete(directory, frozenset(doomed) - here, disk)
    _delete(directory, gradients - here, disk)
    left = sorted(set(condemned) - set(deleted))
    if left or (directory / PACKS / CONDEMNED).exists():
        write_durably(directory / PACKS / CONDEMNED, json.dumps(left).encode(), disk)
    free = (f"{pack.parent.name}/{pack.name}" for pack in unnamed(directory, here, newest))
    return Swept(
        removed=removed,
        condemnable=tuple(sorted({*free, *_worn(directory, kept)} - set(left))),
        deleted=deleted,
    )


def condemned_packs(directory: Path) -> frozenset[str]:
    """Which a writer must not refer to; none where that cannot be read, because a commit refuses them in any case."""
    with suppress(OSError, ValueError):
        return frozenset(json.loads((directory / PACKS / CONDEMNED).read_bytes()))
    return frozenset()


def _of(path: Path) -> tuple[Generation, Step] | None:
    of = named(path)
    return (of[1], of[0]) if of else None


def _remove(directory: Path, kept: Collection[str], newest: tuple[Generation, Step], disk: Disk) -> tuple[Path, ...]:
    removed = []
    for step, generation, path in candidates(directory):
        if path.name in kept or (generation, step) >= newest:
            continue
        with suppress(OSError):
            disk.unlink(path / MANIFEST)  # first, so that half a directory is never taken for a checkpoint
            disk.sync_directory(path)
            remove_tree(path, disk)
            removed.append(path)
    if removed:
        disk.sync_directory(directory)  # before any pack goes: no manifest may come back that names one
    return tuple(removed)


def _delete(directory: Path, doomed: Collection[str], disk: Disk) -> tuple[str, ...]:
    deleted = []
    for name in sorted(doomed):
        with suppress(OSError):
            disk.unlink(directory / PACKS / indexes.check_pack_name(name))
            deleted.append(name)
    return tuple(deleted)


def _worn(directory: Path, kept: dict[str, Manifest]) -> list[str]:
    """Packs of the newest that is kept which hold little of it, and are not its own."""
    if not kept:
        return []
    newest = max(kept, key=lambda name: (kept[name].generation, kept[name].step))
    try:
        parts = [indexes.load(directory / newest, shard) for shard in kept[newest].shards]
    except CheckpointCorrupt:
        return []
    return [pack for pack, share in live_shares(parts).items() if share < WORN]
