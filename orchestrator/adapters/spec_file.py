"""What a job is, kept beside its checkpoints, so that they mean something by themselves: job-<hash>.json.

Its name and its contents are of the spec whose hash every manifest carries; a version that writes the same spec in other
words writes another file. JSON throughout: nothing here can be executed. The standard library is all it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..domain import codec
from ..domain.ids import JobId
from ..domain.profile import Profile
from ..domain.spec import JobSpec
from .durable import make_directories, write_durably
from .index import CheckpointCorrupt

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The job that a checkpoint was made by."""

    job: JobId
    spec: JobSpec
    profile: Profile


def hash_of(spec: JobSpec) -> str:
    return hashlib.sha256(codec.dumps(spec)).hexdigest()


def file_of(folder: Path, spec_hash: str) -> Path:
    return folder / f"job-{spec_hash[:16]}.json"


def keep(folder: Path, kept: Kept) -> None:
    """Write it, where it is not there yet: durable when this returns. Raises OSError."""
    file = file_of(folder, hash_of(kept.spec))
    if file.exists():
        return
    make_directories(folder)
    body = {
        "format": FORMAT,
        "job": kept.job,
        "spec": codec.encode(kept.spec),
        "profile": codec.encode(kept.profile),
    }
    write_durably(file, json.dumps({"sha256": _digest(body), **body}, indent=1).encode())


def load(folder: Path, spec_hash: str) -> Kept:
    """Of the checkpoints in `folder` whose manifests carry this hash. Raises CheckpointCorrupt."""
    file = file_of(folder, spec_hash)
    try:
        body: dict[str, Any] = json.loads(file.read_bytes())
        if body.pop("sha256") != _digest(body) or hashlib.sha256(_plain(body["spec"])).hexdigest() != spec_hash:
            raise CheckpointCorrupt(
                f"{file} is not what was written; put back a copy of it, or give the job's spec yourself"
            )
        if body["format"] != FORMAT:
            raise CheckpointCorrupt(f"{file} has format {body['format']}, this version reads {FORMAT}; upgrade to read it")
        return Kept(
            job=JobId(body["job"]), spec=codec.decode(JobSpec, body["spec"]), profile=codec.decode(Profile, body["profile"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointCorrupt(
            f"{file} {said}; without it nobody knows what job these checkpoints are of, so put back a copy of it"
        ) from error


def _plain(value: Any) -> bytes:
    """As the codec writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
