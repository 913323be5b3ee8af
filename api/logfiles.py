"""Reading the log files of a job's ranks: which one is meant, and a piece of it by lines or by bytes.

User code runs as the writer of these files, so nothing here follows a link or leaves the job's own directory.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.secrecy import Veil
from orchestrator.domain.state import Failed

from .problems import invalid, not_found
from .projections import current_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    text: str
    next_offset: int
    is_cut: bool
    """More lies before (tail) or after (offset) than one answer may hold."""
    begins: int = 0
    """Bytes before this place are no longer kept."""


def choose(record: JobRecord, directory: Path, rank: int | None, device: str | None) -> Device:
    """The device whose log is meant. Raises Problem."""
    if rank is not None and device is not None:
        raise invalid("rank", rank, "must not be given together with device")
    if device is not None:
        return parse_device(device)
    plan = current_plan(record)
    if rank is not None:
        if plan is None:
            raise not_found(f"{record.id} has no ranks yet; wait until it has started")
        if not 0 <= rank < plan[1].world_size:
            allowed = f"0..{plan[1].world_size - 1}"
            raise invalid("rank", rank, f"must be {allowed} in generation {plan[0]}", allowed)
        return plan[1].devices[rank]
    if isinstance(record.state, Failed) and record.state.device is not None:
        return record.state.device
    have = devices_with_logs(directory)
    preferred = [item for item in (plan[1].devices if plan else ()) if str(item) in have]
    if preferred:
        return preferred[0]
    if have:
        return parse_device(have[0])
    raise not_found(f"{record.id} has no logs yet; they begin when its first rank starts")


def choose_many(record: JobRecord, directory: Path, ranks: Sequence[int], devices: Sequence[str]) -> list[Device]:
    """Those that are named, of ranks and devices together; every device with a log where none is. Raises Problem."""
    if not ranks and not devices:
        return [parse_device(text) for text in devices_with_logs(directory)]
    named = [choose(record, directory, rank, None) for rank in ranks] + [parse_device(text) for text in devices]
    return list(dict.fromkeys(named))


async def read(directory: Path, device: Device, tail: int | None, offset: int | None, max_bytes: int, veil: Veil) -> Chunk:
    """Raises Problem where there is no such log. What veil hides is so many stars: places stay what they are."""
    if tail is not None and offset is not None:
        raise invalid("tail", tail, "must not be given together with offset")
    return await anyio.to_thread.run_sync(_read, directory, device, tail, offset, max_bytes, veil)


def _read(directory: Path, device: Device, tail: int | None, offset: int | None, max_bytes: int, veil: Veil) -> Chunk:
    with opened(directory, device) as file:
        size, begins = os.fstat(file.fileno()).st_size, begins_at(file)
        start = max(begins, min(offset, size) if offset is not None else size - max_bytes)
        data = piece(file, start, max_bytes, veil)
    is_cut = start + len(data) < size if offset is not None else start > 0
    text, next_offset = _decoded(data, start)
    if offset is None and start > 0:
        text = text.partition("\n")[2]
    if tail is not None:
        lines = text.splitlines(keepends=True)
        text = "".join(lines[len(lines) - min(tail, len(lines)) :])
    return Chunk(text=text, next_offset=next_offset, is_cut=is_cut, begins=begins)


def begins_at(file: BinaryIO) -> int:
    """Bytes before this place are no longer kept: a log that somebody writes to is bounded (worker/logs.py)."""
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_DATA)
    except OSError:
        return 0  # it is empty


def opened(directory: Path, device: Device) -> BinaryIO:
    """Raises Problem."""
    try:
        return plain_file(log_path(directory, device))
    except OSError as error:
        have = ", ".join(devices_with_logs(directory)) or "none yet"
        raise not_found(f"no log of {device}; devices with logs: {have}") from error


def log_path(directory: Path, device: Device) -> Path:
    return directory / f"{device.node}-{device.index}.log"


def plain_file(path: Path) -> BinaryIO:
    """Raises OSError where it is anything else, such as a link, or what one would wait for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(f"{path} is not a file")
    return file


def piece(file: BinaryIO, start: int, max_bytes: int, veil: Veil) -> bytes:
    """What stands from a place on, covered: it is read with as much around it as a secret across its edges takes."""
    before = min(start, veil.reach)  # of what is no longer kept these are zeros
    file.seek(start - before)
    return veil.over_bytes(file.read(before + max_bytes + veil.reach))[before : before + max_bytes]


def _decoded(data: bytes, start: int) -> tuple[str, int]:
    """Whole characters only: a character whose last bytes are not there yet is left for the next read."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, start + len(data) - len(decoder.getstate()[0])


def parse_device(text: str) -> Device:
    node, _, index = text.rpartition("/")
    if "/" in node or not _is_device(node, index):
        raise invalid("device", text, "must be node/index, for example node-1/0", "node/index")
    return Device(NodeId(node), int(index))


def devices_with_logs(directory: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))
    except OSError:
        return []
    stems = (name.removesuffix(".log").rpartition("-") for name in names if name.endswith(".log"))
    return [f"{node}/{index}" for node, _, index in stems if _is_device(node, index)]


def _is_device(node: str, index: str) -> bool:
    return bool(node) and node.isprintable() and index.isascii() and index.isdigit() and len(index) <= 6
