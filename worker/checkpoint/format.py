"""The bytes of a checkpoint: which pieces a data file has, and the index that describes them.

    step-00000050.g3/
      <device>.bin     the device's owned state, piece after piece, little-endian fp32
      <device>.json    the index of that file: step, answer, lines; of each piece line, kind, start, stop, offset, sha256
      manifest.json    written last, by the control plane: without it the directory is no checkpoint

A piece is an interval cut on the fixed CHUNK grid of its line, so piece boundaries never depend on the plan except at the
edges of owned intervals. There is nothing to execute in any of these files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.domain import codec
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.profile import CHUNK, Interval, Profile

FORMAT = 1
ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoredPiece:
    interval: Interval
    kind: str
    offset: int
    """Bytes from the start of the data file."""
    sha256: str


def chunks(interval: Interval) -> Iterator[Interval]:
    """The interval cut on the grid of its line."""
    start = interval.start
    while start < interval.stop:
        stop = min(interval.stop, (start // CHUNK + 1) * CHUNK)
        yield Interval(interval.line, start, stop)
        start = stop


def file_stem(device: Device) -> str:
    """Unlike for unlike devices, whatever characters a node's name has."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in device.node)
    mark = hashlib.sha256(str(device).encode()).hexdigest()[:8]
    return f"{safe}.{device.index}.{mark}"


def encode_index(
    *,
    step: Step,
    generation: Generation,
    answer: Answer | None,
    device: Device,
    data: str,
    num_bytes: int,
    profile: Profile,
    pieces: tuple[StoredPiece, ...],
) -> bytes:
    return json.dumps(
        {
            "format": FORMAT,
            "step": step,
            "generation": generation,
            "answer": codec.encode(answer),
            "device": str(device),
            "data": data,
            "bytes": num_bytes,
            "lines": {line.name: line.numel for line in profile.lines},
            "pieces": [[p.interval.line, p.kind, p.interval.start, p.interval.stop, p.offset, p.sha256] for p in pieces],
        },
        separators=(",", ":"),
    ).encode()
