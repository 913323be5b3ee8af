"""Committing checkpoints on a file system: the manifest, written last, makes a directory one.

    checkpoints/
      packs/<device stem>/<step>.g<generation>.pack   stored pieces, back to back; never changed, named by many indexes
      step-00000050.g3/<device stem>.json             index: each piece of the device's share, and where it is
      step-00000050.g3/manifest.json                  names the indexes with their hashes, and the packs with their sizes

Ranks write packs and indexes; this module decides that together they are whole. It never reads tensor data and needs only
the standard library. Strays and half-written directories are stepped over, never trusted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..domain import codec
from ..domain.checkpoint import CheckpointRef, ShardRef
from ..domain.errors import EverstepError
from ..domain.generation import Answer
from ..domain.ids import Generation, NodeId, Step
from ..domain.profile import Profile
from . import index as indexes
from .durable import DISK, Disk, write_durably
from .folder import going, latest, live_shares, named_packs, prune
from .index import FORMAT, GRADIENT, STATE, CheckpointCorrupt, CheckpointTooNew, Index
from .sealed import (
    KINDS_OF,
    LONGEST_CHAIN,
    MANIFEST,
    Kind,
    Manifest,
    Parent,
    directory_name,
    load_chain,
    load_indexes,
    load_manifest,
    sealed,
)

__all__ = [
    "CheckpointCorrupt",
    "CheckpointIncomplete",
    "CheckpointTooNew",
    "Kind",
    "LONGEST_CHAIN",
    "MANIFEST",
    "Manifest",
    "Parent",
    "commit",
    "directory_name",
    "going",
    "latest",
    "live_shares",
    "load_chain",
    "load_indexes",
    "load_manifest",
    "named_packs",
    "prune",
]


DTYPE = "fp32"
"""Of every line, whatever ranks compute in."""


class CheckpointIncomplete(EverstepError):
    """The shards do not hold every element of every line exactly once."""


def commit(
    path: Path,
    step: Step,
    generation: Generation,
    spec_hash: str,
    seed: int,
    shards: Sequence[ShardRef],
    *,
    condemned: frozenset[str] = frozenset(),
    profile: Profile | None = None,
    disk: Disk = DISK,
) -> CheckpointRef:
    """Make the directory `path` a checkpoint. Committing the same shards again is harmless.

    Whether it is a base or a journal entry is what the shards say; an entry's parent is the checkpoint of the step before
    in the same generation.
    condemned: packs that are about to go. profile: the program's, which says its shapes. Raises CheckpointIncomplete where
    a shard lies in one of those, the shards do not partition every line or an entry has no parent, CheckpointCorrupt where
    a file of one is not as announced, OSError where the manifest cannot be written.
    """
    shards = tuple(sorted(shards, key=lambda shard: shard.device))
    parts = [indexes.load(path, shard) for shard in shards]
    if any((part.step, part.generation) != (step, generation) for part in parts):
        others = sorted({f"step {part.step} of generation {part.generation}" for part in parts})
        wanted = f"step {step} of generation {generation}"
        raise CheckpointIncomplete(f"{path}: shards of {', '.join(others)}, wanted {wanted} alone")
    kind = _one_kind(path, parts)
    lines = _check_partition(path, parts, KINDS_OF[kind])
    packs = {pack: size for part in parts for pack, size in part.packs.items()}
    if going := sorted(condemned & set(packs)):
        raise CheckpointIncomplete(f"{path} lies partly in {going[0]}, which is about to go; the next save stores it again")
    indexes.check_packs(path, packs)
    answer = _one_answer(path, parts)
    if kind == "journal" and (answer is None or answer.step != step):
        raise CheckpointIncomplete(f"{path}: a journal entry without the answer to the vote of step {step}")
    parent = _parent(path.parent, step, generation) if kind == "journal" else None
    new_bytes = sum(part.new_bytes for part in parts)
    total_bytes = sum({(p.pack, p.offset): p.length for part in parts for p in part.pieces}.values())
    body = {
        "format": FORMAT,
        "kind": kind,
        "step": step,
        "generation": generation,
        "spec_hash": spec_hash,
        "program_hash": profile.program_sha256 if profile else "",
        "shapes": {line.name: line.shape for line in profile.lines} if profile else {},
        "dtype": DTYPE,
        "seed": seed,
        "answer": codec.encode(answer),
        "lines": dict(lines),
        "shards": [[s.device.node, s.device.index, s.index, s.sha256] for s in shards],
        "packs": dict(sorted(packs.items())),
        "new_bytes": new_bytes,
        "total_bytes": total_bytes,
        "parent": [directory_name(parent.step, parent.generation), parent.sha256] if parent else None,
        "depth": parent.depth + 1 if parent else 0,
    }
    write_durably(path / MANIFEST, sealed(body), disk)
    disk.sync_directory(path.parent)  # the directory itself may be new
    return CheckpointRef(
        step=step,
        generation=generation,
        path=str(path),
        answer=answer,
        kind=kind,
        depth=parent.depth + 1 if parent else 0,
        total_bytes=total_bytes,
        new_bytes=new_bytes,
        local=_local_nodes(shards),
    )


def _local_nodes(shards: Sequence[ShardRef]) -> tuple[NodeId, ...]:
    """Where all that a node's devices wrote is on its own disk too."""
    elsewhere = {shard.device.node for shard in shards if not shard.is_local}
    return tuple(sorted({shard.device.node for shard in shards} - elsewhere))


def _one_kind(path: Path, parts: Sequence[Index]) -> Kind:
    told = {part.kinds for part in parts}
    if len(told) > 1:
        raise CheckpointIncomplete(f"{path}: some shards are of the state and some of the gradient")
    if told and told not in ({STATE}, {GRADIENT}):
        raise CheckpointIncomplete(f"{path}: shards of unknown kinds {sorted(told)}")
    return "journal" if told == {GRADIENT} else "base"


def _parent(directory: Path, step: Step, generation: Generation) -> Manifest:
    """Of a journal entry. It is of the same generation: what others left may have been rolled back since."""
    path = directory / directory_name(Step(step - 1), generation)
    try:
        parent = load_manifest(path)
        # What that one goes on from was looked at when it was committed itself.
        indexes.check_packs(path, parent.packs)
        for shard in parent.shards:
            indexes.check(path, shard)
    except CheckpointCorrupt as error:
        said = f"{directory}: no checkpoint {path.name} for the journal of step {step} to go on from ({error})"
        raise CheckpointIncomplete(said) from error
    if parent.depth >= LONGEST_CHAIN:
        raise CheckpointIncomplete(f"{path} is {parent.depth} steps from its base; the next is a base again")
    return parent


def _check_partition(path: Path, parts: Sequence[Index], kinds: Sequence[str]) -> Mapping[str, int]:
    """The lines, once every element of each kind is found exactly once."""
    if not parts:
        raise CheckpointIncomplete(f"{path}: no shards")
    lines = parts[0].lines
    if any(part.lines != lines for part in parts):
        raise CheckpointIncomplete(f"{path}: shards describe different programs")
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for part in parts:
        for piece in part.pieces:
            found[piece.line, piece.kind].append((piece.start, piece.stop))
    if extra := set(found) - {(line, kind) for line in lines for kind in kinds}:
        raise CheckpointIncomplete(f"{path}: pieces of {sorted(extra)} belong to no line")
    for line, numel in lines.items():
        for kind in kinds:
            position = 0
            for start, stop in sorted(found[line, kind]):
                if start != position:
                    fault = "missing from" if start > position else "twice from"
                    raise CheckpointIncomplete(f"{path}: {kind} of {line} is {fault} element {min(start, position)} on")
                position = stop
            if position != numel:
                raise CheckpointIncomplete(f"{path}: {kind} of {line} ends at element {position} of {numel}")
    return lines


def _one_answer(path: Path, parts: Sequence[Index]) -> Answer | None:
    """What every device was told of the step it saved."""
    told = {part.answer for part in parts if part.answer is not None}
    if len(told) > 1:
        raise CheckpointIncomplete(f"{path}: shards of {len(told)} different answers to one vote")
    return next(iter(told), None)
