"""Lines of many ranks' logs as one, in the order of time: looked through by time and words, and gone on with by bytes.

A line's time is when its node first saw it there (`.times` beside each log, see worker/logtimes.py), to about a second. Who
comes back says how many bytes of each log he has; lines are given whole, and one whose end is not written yet is left for
the next time. logfiles.py opens and covers; this knows lines.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from orchestrator.domain.errors import Refused
from orchestrator.domain.ids import Device
from orchestrator.domain.secrecy import Veil

from .logfiles import begins_at, log_path, parse_device, piece, plain_file

MAX_LINES = 10_000
LEAST_BYTES = 1 << 16
"""Of each log, however many there are."""
_NOTE = struct.Struct("<dQ")
_MOST_NOTES = 1 << 17
"""Twice what a host keeps of a log (worker/logtimes.py): a program may have put anything there."""
_LATEST = 250_000_000_000.0
"""Seconds, in the year 9892: later ones are no dates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    device: Device
    at: float
    offset: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """after: bytes of each log that are known already. since: wall clock. tail: only so many, of the logs' ends."""

    after: Mapping[Device, int] = field(default_factory=dict)
    since: float | None = None
    words: str = ""
    tail: int | None = None
    is_over: bool = False
    """Nobody writes any more: a last line without an end is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """after: to go on with. is_cut: more stands there now, before these lines (tail) or behind them."""

    lines: tuple[Line, ...]
    after: Mapping[Device, int]
    is_cut: bool


@dataclass(slots=True)
class _Log:
    """What was read of one log. begins, reached: bytes."""

    lines: list[Line]
    begins: int
    reached: int
    is_cut: bool


def places(text: str) -> dict[Device, int]:
    """`node-1/0:12,node-2/1:0` as {node-1/0: 12, node-2/1: 0}. Raises Refused, Problem."""
    found: dict[Device, int] = {}
    for part in filter(None, text.split(",")):
        device, _, offset = part.rpartition(":")
        if not offset.isascii() or not offset.isdigit() or len(offset) > 15:
            raise Refused(f"{part[:200]!r} is no place in a log; use `next` of an answer, or node/index:bytes")
        found[parse_device(device)] = int(offset)
    return found


def as_text(after: Mapping[Device, int]) -> str:
    return ",".join(f"{device}:{offset}" for device, offset in sorted(after.items()))


async def read(directory: Path, devices: Sequence[Device], asked: Asked, max_bytes: int, veil: Veil) -> Found:
    """Of those of the devices that have a log yet."""
    return await anyio.to_thread.run_sync(_read, directory, devices, asked, max_bytes, veil)


def _read(directory: Path, devices: Sequence[Device], asked: Asked, max_bytes: int, veil: Veil) -> Found:
    share = max(LEAST_BYTES, max_bytes // max(1, len(devices)))
    logs = {}
    for device in devices:
        try:
            logs[device] = _read_one(directory, device, asked, share, veil)
        except OSError:
            continue  # it has none yet, or was never to have one
    lines = sorted(
        (line for log in logs.values() for line in log.lines), key=lambda line: (line.at, line.device, line.offset)
    )
    ends = {device: log.reached for device, log in logs.items()}
    if asked.tail is not None:
        matching = [line for line in lines if asked.words in line.text]
        shown = matching[len(matching) - min(asked.tail, len(matching)) :]
        is_cut = len(shown) < len(matching) or any(log.begins > 0 for log in logs.values())
        return Found(lines=tuple(shown), after={**asked.after, **ends}, is_cut=is_cut)
    # Of a log that was read in part nobody knows the times behind it: lines of the others that are later wait for it.
    known = min((log.lines[-1].at for log in logs.values() if log.is_cut and log.lines), default=float("inf"))
    taken = [line for line in lines if line.at <= known][:MAX_LINES]
    left = {line.device: line.offset for line in reversed(lines[len(taken) :])}
    return Found(
        lines=tuple(line for line in taken if asked.words in line.text),
        after={**asked.after, **ends, **left},
        is_cut=bool(left) or any(log.is_cut for log in logs.values()),
    )


def _read_one(directory: Path, device: Device, asked: Asked, share: int, veil: Veil) -> _Log:
    """Raises OSError where there is none."""
    with plain_file(log_path(directory, device)) as file:
        found = os.fstat(file.fileno())
        sizes, times = _times(directory, device, found)
        start = asked.after.get(device)
        is_whole = start is not None
        if start is None:
            start = _before(sizes, times, asked.since) if asked.since is not None else 0
            start = max(start, found.st_size - share) if asked.tail is not None else start
        begins = begins_at(file)
        is_whole = is_whole and start >= begins
        start = max(begins, min(start, found.st_size))
        data = piece(file, start, share, veil)
        if not is_whole and start > 0 and piece(file, start - 1, 1, Veil()) != b"\n":
            cut = data.find(b"\n") + 1
            start, data = start + cut, data[cut:]
    is_cut = start + len(data) < found.st_size
    if not (asked.is_over and not is_cut) and (whole := data.rfind(b"\n") + 1):
        data = data[:whole]
    elif not is_cut and not asked.is_over:
        data = b""  # the beginning of a line
    lines, at = [], start
    for raw in _by_newlines(data):
        text = raw.decode(errors="replace").removesuffix("\n")
        lines.append(Line(device=device, at=_seen_at(sizes, times, at), offset=at, end=at + len(raw), text=text))
        at += len(raw)
    return _Log(lines=lines, begins=start, reached=start + len(data), is_cut=is_cut)


def _by_newlines(data: bytes) -> list[bytes]:
    """A progress bar's carriage returns end none."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _times(directory: Path, device: Device, log: os.stat_result) -> tuple[list[int], list[float]]:
    """Sizes the log was seen at, and when; what stands beyond them was written at its last change."""
    try:
        with plain_file(log_path(directory, device).with_suffix(".times")) as file:
            known = file.read(_MOST_NOTES * _NOTE.size)
    except OSError:
        known = b""
    whole = _NOTE.iter_unpack(known[: len(known) // _NOTE.size * _NOTE.size])
    notes = [(at, size) for at, size in whole if size <= log.st_size and 0 <= at <= _LATEST]
    if not notes or notes[-1][1] < log.st_size:
        notes.append((max(0.0, min(log.st_mtime, _LATEST), notes[-1][0] if notes else 0.0), log.st_size))
    return [size for _, size in notes], [at for at, _ in notes]


def _seen_at(sizes: Sequence[int], times: Sequence[float], offset: int) -> float:
    return times[min(bisect_right(sizes, offset), len(times) - 1)]


def _before(sizes: Sequence[int], times: Sequence[float], since: float) -> int:
    """Bytes that were there before this instant."""
    place = bisect_left(times, since)
    return sizes[place - 1] if place else 0
