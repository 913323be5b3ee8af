"""Committing, finding and removing checkpoints on a file system: the manifest, written last, makes a directory one.

Ranks write shards (a data file and an index each); this module decides that together they are whole. It never reads tensor
data and needs nothing but the standard library. Strays and half-written directories are stepped over, never trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..domain import codec
from ..domain.checkpoint import CheckpointRef, ShardRef
from ..domain.errors import EverstepError
from ..domain.generation import Answer
from ..domain.ids import Device, Generation, NodeId, Step

FORMAT = 1
MANIFEST = "manifest.json"
KINDS = ("p", "m", "v")
ITEM_BYTES = 4
_NAME = re.compile(r"step-(\d{8,})\.g(\d+)")


class CheckpointIncomplete(EverstepError):
    """The shards do not hold every element of every line exactly once."""


class CheckpointCorrupt(EverstepError):
    """A file of a committed checkpoint is missing or is not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    step: Step
    generation: Generation
    spec_hash: str
    seed: int
    lines: Mapping[str, int]
    """Name of each line -> its elements."""
    shards: tuple[ShardRef, ...]
    answer: Answer | None
    """Of the vote that committed `step`; None where an earlier version wrote it."""


@dataclass(frozen=True, slots=True)
class IndexedPiece:
    line: str
    kind: str
    start: int
    stop: int
    offset: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    step: Step
    data: str
    num_bytes: int
    lines: Mapping[str, int]
    pieces: tuple[IndexedPiece, ...]
    answer: Answer | None


def directory_name(step: Step, generation: Generation) -> str:
    return f"step-{step:08d}.g{generation}"


def commit(
    path: Path, step: Step, generation: Generation, spec_hash: str, seed: int, shards: Sequence[ShardRef]
) -> CheckpointRef:
    """Make the directory `path` a checkpoint. Committing the same shards again is harmless.

    Raises CheckpointIncomplete where the shards do not partition every line, CheckpointCorrupt where a file of one is not
    as announced, OSError where the manifest cannot be written.
    """
    shards = tuple(sorted(shards, key=lambda shard: shard.device))
    indexes = [load_index(path, shard) for shard in shards]
    if any(index.step != step for index in indexes):
        raise CheckpointIncomplete(f"{path}: shards of steps {sorted({i.step for i in indexes})}, wanted {step} alone")
    lines = _check_partition(path, indexes)
    answer = _one_answer(path, indexes)
    body = {
        "format": FORMAT,
        "step": step,
        "generation": generation,
        "spec_hash": spec_hash,
        "seed": seed,
        "answer": codec.encode(answer),
        "lines": dict(lines),
        "shards": [[s.device.node, s.device.index, s.index, s.sha256] for s in shards],
    }
    write_durably(path / MANIFEST, json.dumps({"sha256": _digest(body), **body}, indent=1).encode())
    return CheckpointRef(step=step, generation=generation, path=str(path), answer=answer)


def latest(directory: Path) -> CheckpointRef | None:
    """The newest checkpoint whose manifest, indexes and data files are all there; tensor data is checked when read."""
    return next(_committed(directory), None)


def prune(directory: Path, keep_last: int, keep: Collection[Path] = ()) -> tuple[Path, ...]:
    """Remove all but the newest `keep_last` checkpoints (never the newest) and `keep`, and unfinished ones older than the
    newest.

    Returns what was removed. What cannot be removed is left for next time.
    """
    committed = list(_committed(directory))
    if not committed:
        return ()
    kept = {Path(ref.path) for ref in committed[: max(1, keep_last)]} | set(keep)
    newest = committed[0].step
    removed = []
    for step, _, path in _candidates(directory):
        if path in kept or (step >= newest and path not in {Path(ref.path) for ref in committed}):
            continue
        try:
            (path / MANIFEST).unlink(missing_ok=True)  # first, so that half a directory is never taken for a checkpoint
            shutil.rmtree(path)
        except OSError:
            continue
        removed.append(path)
    return tuple(removed)


def load_manifest(path: Path) -> Manifest:
    """Raises CheckpointCorrupt."""
    file = path / MANIFEST
    try:
        body = json.loads(file.read_bytes())
        digest = body.pop("sha256")
        if digest != _digest(body):
            raise CheckpointCorrupt(f"{file} does not have the hash it was written with; restore an older checkpoint")
        if body["format"] != FORMAT:
            raise CheckpointCorrupt(f"{file} has format {body['format']}, this version reads {FORMAT}; upgrade to read it")
        return Manifest(
            step=Step(body["step"]),
            generation=Generation(body["generation"]),
            spec_hash=body["spec_hash"],
            seed=body["seed"],
            lines=body["lines"],
            shards=tuple(
                ShardRef(device=Device(NodeId(node), number), index=index, sha256=sha256)
                for node, number, index, sha256 in body["shards"]
            ),
            answer=codec.decode(Answer | None, body.get("answer")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{file} cannot be read: {error}; restore an older checkpoint") from error


def load_index(path: Path, shard: ShardRef) -> Index:
    """Raises CheckpointCorrupt, also where the data file is not as long as its pieces."""
    file = path / shard.index
    try:
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != shard.sha256:
            raise CheckpointCorrupt(f"{file} does not have the hash it was announced with; restore an older checkpoint")
        body = json.loads(content)
        index = Index(
            step=Step(body["step"]),
            data=body["data"],
            num_bytes=body["bytes"],
            lines=body["lines"],
            pieces=tuple(IndexedPiece(*piece) for piece in body["pieces"]),
            answer=codec.decode(Answer | None, body.get("answer")),
        )
        size = (path / index.data).stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{file} cannot be used: {error}; restore an older checkpoint") from error
    if size != index.num_bytes:
        raise CheckpointCorrupt(
            f"{path / index.data} has {size} bytes, its index says {index.num_bytes}; restore an older checkpoint"
        )
    return index


def write_durably(file: Path, content: bytes) -> None:
    """Replace `file` by `content`: whole or not at all, and on disk when this returns."""
    draft = file.with_name(file.name + ".tmp")
    with draft.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(file)
    for directory in (file.parent, file.parent.parent):  # the second because the directory itself may be new
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_partition(path: Path, indexes: Sequence[Index]) -> Mapping[str, int]:
    """The lines, once every element of each kind is found exactly once."""
    if not indexes:
        raise CheckpointIncomplete(f"{path}: no shards")
    lines = indexes[0].lines
    if any(index.lines != lines for index in indexes):
        raise CheckpointIncomplete(f"{path}: shards describe different programs")
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for index in indexes:
        for piece in index.pieces:
            if piece.offset + (piece.stop - piece.start) * ITEM_BYTES > index.num_bytes:
                raise CheckpointCorrupt(f"{path / index.data} ends before {piece.kind} of {piece.line}")
            found[piece.line, piece.kind].append((piece.start, piece.stop))
    if extra := set(found) - {(line, kind) for line in lines for kind in KINDS}:
        raise CheckpointIncomplete(f"{path}: pieces of {sorted(extra)} belong to no line")
    for line, numel in lines.items():
        for kind in KINDS:
            position = 0
            for start, stop in sorted(found[line, kind]):
                if start != position:
                    fault = "missing from" if start > position else "twice from"
                    raise CheckpointIncomplete(f"{path}: {kind} of {line} is {fault} element {min(start, position)} on")
                position = stop
            if position != numel:
                raise CheckpointIncomplete(f"{path}: {kind} of {line} ends at element {position} of {numel}")
    return lines


def _one_answer(path: Path, indexes: Sequence[Index]) -> Answer | None:
    """What every device was told of the step it saved."""
    told = {index.answer for index in indexes if index.answer is not None}
    if len(told) > 1:
        raise CheckpointIncomplete(f"{path}: shards of {len(told)} different answers to one vote")
    return next(iter(told), None)


def _committed(directory: Path) -> Iterator[CheckpointRef]:
    """Newest first."""
    for step, generation, path in _candidates(directory):
        try:
            manifest = load_manifest(path)
            for shard in manifest.shards:
                load_index(path, shard)
        except CheckpointCorrupt:
            continue
        if (manifest.step, manifest.generation) == (step, generation):
            yield CheckpointRef(step=step, generation=generation, path=str(path), answer=manifest.answer)


def _candidates(directory: Path) -> list[tuple[Step, Generation, Path]]:
    """Directories named like checkpoints, newest first."""
    try:
        names = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(
        ((Step(int(m[1])), Generation(int(m[2])), path) for path, m in names if m), key=lambda c: c[:2], reverse=True
    )


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
