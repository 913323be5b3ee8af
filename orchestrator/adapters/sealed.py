"""The manifest of one checkpoint: the file whose being there makes a directory one, and what it is read from.

It owns the format of that file and the way from a journal entry back to its base. Every byte of a manifest is under the
hash it begins with. It decides nothing about which checkpoints stay.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..domain import codec
from ..domain.checkpoint import LONGEST_JOURNAL, CheckpointRef, ShardRef
from ..domain.generation import Answer
from ..domain.ids import Device, Generation, NodeId, Step
from . import index as indexes
from .index import FORMAT, GRADIENT, STATE, CheckpointCorrupt, CheckpointTooNew, Index, Wants

Kind: TypeAlias = Literal["base", "journal"]
"""base: the whole state. journal: the gradient of one step, which leads from the state of its parent to that of its own."""

MANIFEST = "manifest.json"
LONGEST_CHAIN = LONGEST_JOURNAL
"""Journal entries from a base to a checkpoint at most: bounds how long a restore replays."""
KINDS_OF: Mapping[str, tuple[str, ...]] = {"base": STATE, "journal": GRADIENT}
_NAME = re.compile(r"step-(\d{8,})\.g(\d+)")
_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",')


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The checkpoint of the step before, which an entry goes on from. name: its directory; sha256: its manifest's."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    kind: Kind
    step: Step
    generation: Generation
    spec_hash: str
    seed: int
    lines: Mapping[str, int]
    """Name of each line -> its elements."""
    shards: tuple[ShardRef, ...]
    answer: Answer | None
    """Of the vote that committed `step`; None where an earlier version wrote it."""
    packs: Mapping[str, int]
    """Each that one of its pieces lies in -> its size in bytes."""
    new_bytes: int
    """What this checkpoint added to the packs."""
    total_bytes: int
    """What reading it takes, without its parents."""
    parent: Parent | None
    depth: int
    """Parents from here to the base."""
    sha256: str
    """Of this manifest."""
    program_hash: str = ""
    """Of the program's source; "" where nobody knew it."""


def directory_name(step: Step, generation: Generation) -> str:
    return f"step-{step:08d}.g{generation}"


def named(path: Path) -> tuple[Step, Generation] | None:
    """Of which step and generation a directory is, by its name; None for strays."""
    match = _NAME.fullmatch(path.name)
    return (Step(int(match[1])), Generation(int(match[2]))) if match else None


def load_chain(path: Path, loaded: dict[Path, Manifest] | None = None) -> tuple[tuple[Path, Manifest], ...]:
    """What a checkpoint is read from: its base first, itself last. Raises CheckpointCorrupt saying what is missing.

    loaded: manifests that need not be read again; grows by those that were read.
    """
    loaded = {} if loaded is None else loaded

    def load(at: Path) -> Manifest:
        if at not in loaded:
            loaded[at] = load_manifest(at)
        return loaded[at]

    chain = [(path, load(path))]
    while (parent := chain[-1][1].parent) is not None:
        child, at = chain[-1][1], path.parent / parent.name
        if len(chain) > LONGEST_CHAIN or not _NAME.fullmatch(parent.name):
            raise CheckpointCorrupt(f"{path} goes on from {parent.name!r}, which leads nowhere; restore an older one")
        found = load(at)
        told = (parent.sha256, child.step - 1, child.generation, child.lines, named(at))
        if (found.sha256, found.step, found.generation, found.lines, (found.step, found.generation)) != told:
            raise CheckpointCorrupt(f"{at} is not what {chain[-1][0].name} goes on from; restore an older checkpoint")
        chain.append((at, found))
    return tuple(reversed(chain))


def reference(path: Path, manifest: Manifest) -> CheckpointRef:
    return CheckpointRef(
        step=manifest.step,
        generation=manifest.generation,
        path=str(path),
        answer=manifest.answer,
        kind=manifest.kind,
        depth=manifest.depth,
        total_bytes=manifest.total_bytes,
        new_bytes=manifest.new_bytes,
    )


def load_manifest(path: Path) -> Manifest:
    """Raises CheckpointCorrupt, CheckpointTooNew, CheckpointAway."""
    file = path / MANIFEST
    try:
        content = file.read_bytes()
    except OSError as error:
        raise indexes.unread(str(file), error) from error
    try:
        body = json.loads(content)
        head = _HEAD.match(content)
        written = body["format"]
        if isinstance(written, int) and written > FORMAT:
            raise CheckpointTooNew(
                f"{file} has format {written}, this version reads up to {FORMAT}; upgrade everstep to read it"
            )
        if written != FORMAT:
            raise CheckpointCorrupt(f"{file} has format {written}, this version reads {FORMAT}; read it with an older one")
        if head is None or _digest(content[head.end() :]) != head[1].decode():
            raise CheckpointCorrupt(f"{file} does not have the hash it was written with; restore an older checkpoint")
        return _manifest(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{file} cannot be read: {error}; restore an older checkpoint") from error


def load_indexes(path: Path, manifest: Manifest, wants: Wants | None = None) -> tuple[Index, ...]:
    """wants: which pieces are of any use.

    Raises CheckpointCorrupt, also where an index is of another checkpoint or a pack is not as long as it was.
    """
    indexes.check_packs(path, manifest.packs)
    parts = tuple(indexes.load(path, shard, wants) for shard in manifest.shards)
    for shard, part in zip(manifest.shards, parts, strict=True):
        if (part.step, part.generation) != (manifest.step, manifest.generation):
            of = f"step {part.step} of generation {part.generation}"
            raise CheckpointCorrupt(f"{path / shard.index} is of {of}; restore an older checkpoint")
    return parts


def sealed(body: Mapping[str, object]) -> bytes:
    """JSON that begins with the hash of every byte after it."""
    rest = json.dumps(body, indent=1).encode()[1:]
    return b'{"sha256": "%s",' % _digest(rest).encode() + rest


def _manifest(body: Mapping[str, Any]) -> Manifest:
    indexes.check_line_names(body["lines"])
    parent = body["parent"]
    if (parent is not None) != (body["kind"] == "journal") or body["kind"] not in KINDS_OF:
        raise ValueError(f"a {body['kind']} with parent {parent}")
    return Manifest(
        kind=body["kind"],
        step=Step(body["step"]),
        generation=Generation(body["generation"]),
        spec_hash=body["spec_hash"],
        seed=body["seed"],
        lines=body["lines"],
        shards=tuple(
            ShardRef(device=Device(NodeId(node), number), index=index, sha256=sha256)
            for node, number, index, sha256 in body["shards"]
        ),
        answer=codec.decode(Answer | None, body["answer"]),
        packs={indexes.check_pack_name(pack): size for pack, size in body["packs"].items()},
        new_bytes=body["new_bytes"],
        total_bytes=body["total_bytes"],
        parent=Parent(name=parent[0], sha256=parent[1]) if parent else None,
        depth=body["depth"],
        sha256=body["sha256"],
        program_hash=body.get("program_hash", ""),
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
