"""Checkpoints by the paths people give: which one is meant, and whether a job can begin with it.

It reads manifests and what is kept beside them, never tensor data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ..domain.checkpoint import CheckpointRef
from ..domain.errors import FieldProblem, Refused
from ..domain.ids import Step
from ..domain.profile import Profile
from ..domain.spec import JobSpec
from . import manifest, spec_file
from .manifest import MANIFEST, CheckpointCorrupt, Manifest
from .places import place
from .sealed import reference

SINCE = "since.json"
"""Beside the manifest: what is known of a checkpoint since it was committed."""
FIELD = "checkpoint.restore_from"
SHOWN = 5
"""Differences that are spelt out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    path: Path
    manifest: Manifest

    @property
    def reference(self) -> CheckpointRef:
        return reference(self.path, self.manifest)

    @property
    def kept(self) -> spec_file.Kept:
        """The job it is of. Raises CheckpointCorrupt."""
        return spec_file.load(self.path.parent, self.manifest.spec_hash)


def find(path: Path, step: int | None = None) -> Found:
    """The checkpoint `path`; or the newest good one (or that of `step`) in a folder of checkpoints or a job's folder.

    Raises Refused where there is none, CheckpointCorrupt where the one that is named cannot be read.
    """
    path = path.expanduser().absolute()
    if (path / MANIFEST).exists():
        found = manifest.load_manifest(path)
        if step is not None and found.step != step:
            raise Refused(f"{path} is the checkpoint of step {found.step}, not {step}; name the folder it is in")
        return Found(path=path, manifest=found)
    folder = folder_of(path)
    if step is not None:
        of_step = [found for found in committed(folder) if found.manifest.step == step]
        if not of_step:
            raise Refused(f"there is no checkpoint of step {step} in {folder}; see everstep ckpt ls")
        return of_step[0]
    newest = manifest.latest(folder)
    if newest is None:
        raise Refused(f"there is no checkpoint that can be read in {folder}; give a checkpoint's folder or a job's")
    return Found(path=place(newest.path), manifest=manifest.load_manifest(place(newest.path)))


def committed(folder: Path) -> list[Found]:
    """Checkpoints in a folder whose manifest can be read, newest first."""
    found = []
    for path in folder.glob("step-*"):
        with suppress(CheckpointCorrupt):
            found.append(Found(path=path, manifest=manifest.load_manifest(path)))
    # A later generation may have been rolled back to an earlier step.
    return sorted(found, key=lambda one: (one.manifest.generation, one.manifest.step), reverse=True)


def folder_of(path: Path) -> Path:
    """Where the checkpoints of a job are, given that folder, the job's, or one checkpoint's. Raises Refused."""
    path = path.expanduser().absolute()
    if not path.is_dir():
        raise Refused(f"{path} is no folder; give a checkpoint's folder or a job's")
    if (path / MANIFEST).exists():
        return path.parent
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def begun_from(spec: JobSpec) -> list[Path]:
    """The folder of checkpoints that a job begins with one of, where it is one that is seen here."""
    asked = spec.checkpoint.restore_from
    with suppress(Refused, CheckpointCorrupt, OSError):
        if asked and isinstance(path := find(place(asked)).path, Path):
            return [path.parent]
    return []


def start_of(spec: JobSpec, profile: Profile) -> CheckpointRef | None:
    """What the job is to begin with; None for its seed. Raises Refused, naming every difference."""
    asked = spec.checkpoint.restore_from
    if not asked:
        return None
    try:
        found = find(place(asked))
        problem = "; ".join(differences(found, profile))
    except (Refused, CheckpointCorrupt) as error:
        raise _refused(asked, f"is {asked!r}, and {error}") from error
    if problem:
        raise _refused(asked, f"is {asked!r}, whose parameters are not this program's: {problem}; use the same model")
    if spec.checkpoint.weights_only:
        # To a worker, state of step 0 is weights alone.
        return replace(found.reference, step=Step(0), answer=None)
    # Its first step has to come out as it did then, if it is the same step.
    is_same = _is_same_step(found, spec, profile)
    start = replace(found.reference, **_since(found)) if is_same else found.reference
    step, steps = found.manifest.step, spec.train.steps
    if step >= steps:
        said = f"is the checkpoint of step {step} and train.steps is {steps}: nothing is left"
        raise _refused(asked, f"{said}; raise that or set checkpoint.weights_only")
    return start


def _is_same_step(found: Found, spec: JobSpec, profile: Profile) -> bool:
    """Whether the same state gives the same losses: the same program on the same samples, with the same random numbers."""
    try:
        kept = found.kept
    except CheckpointCorrupt:
        return False

    def mathematics(spec: JobSpec) -> tuple[object, ...]:
        it = spec.train
        held_out = spec.evaluation.micro_batches if spec.evaluation.every else 0  # samples are drawn from the rest
        numbers = it.seed, it.dtype, it.micro_batches, it.micro_batch_size, it.sequence, held_out
        return spec.program, spec.model, *numbers

    has_same_text = bool(profile.text_sha256) and kept.profile.text_sha256 == profile.text_sha256
    # Who changes the program means it: what the old one gave says nothing of the new one.
    programs = {kept.profile.program_sha256, profile.program_sha256} - {""}
    return has_same_text and len(programs) <= 1 and mathematics(kept.spec) == mathematics(spec)


def _since(found: Found) -> dict[str, Any]:
    """The losses of the step after it, and what their bits belong to, where they were noted."""
    try:
        body = json.loads((found.path / SINCE).read_bytes())
        if body["step"] != found.manifest.step:
            return {}
        return {"bits": str(body["bits"]), "after": tuple(map(float, body["after"]))}
    except (OSError, ValueError, KeyError, TypeError):
        return _told_by_the_next(found)


def _told_by_the_next(found: Found) -> dict[str, Any]:
    """Where every step is saved, the next checkpoint's vote has them: of one generation, a step is voted on once."""
    of = found.manifest
    try:
        told = manifest.load_manifest(found.path.parent / manifest.directory_name(Step(of.step + 1), of.generation)).answer
    except CheckpointCorrupt:
        return {}
    return {"after": told.losses} if told is not None and told.step == of.step + 1 else {}


def differences(found: Found, profile: Profile) -> Iterator[str]:
    """What is not alike in the parameters of a checkpoint and those of a program, in words; the first few of them."""
    theirs = _shapes(found)
    ours = {line.name: line.shape for line in profile.lines}
    said = [
        *(f"it has {name} {_size(theirs[name])}, which the program has not" for name in theirs if name not in ours),
        *(f"it lacks {name} {_size(ours[name])}" for name in ours if name not in theirs),
        *(
            f"{name} is {_size(theirs[name])} there and {_size(shape)} here"
            for name, shape in ours.items()
            if name in theirs and not _alike(theirs[name], shape)
        ),
    ]
    yield from said[:SHOWN]
    if len(said) > SHOWN:
        yield f"and {len(said) - SHOWN} more"


Size = tuple[int, ...] | int
"""A shape, or elements alone where no shape is known."""


def _shapes(found: Found) -> Mapping[str, Size]:
    """Of every line; an earlier version kept their lengths alone."""
    lines: dict[str, Size] = dict(found.manifest.lines)
    try:
        kept = {line.name: line.shape for line in found.kept.profile.lines if line.numel == lines.get(line.name)}
    except CheckpointCorrupt:
        kept = {}
    return {name: kept.get(name, numel) for name, numel in lines.items()}


def _alike(theirs: Size, shape: tuple[int, ...]) -> bool:
    if isinstance(theirs, tuple):
        return theirs == shape
    return theirs == prod(shape)


def _size(size: Size) -> str:
    return " x ".join(map(str, size)) if isinstance(size, tuple) else f"of {size} elements"


def _refused(value: str, said: str) -> Refused:
    message = f"{FIELD} {said}"
    return Refused(message, (FieldProblem(field=FIELD, value=value, message=message, allowed="a checkpoint's folder"),))
