"""The index of one device's share of a checkpoint: which piece of which line lies where, and what its bytes hash to.

It owns the format of that file and which names may stand in it: an index comes from a disk that others can write, so no
name in it leads out of the checkpoints' folder. It never reads tensor data and needs nothing but the standard library.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..domain import codec
from ..domain.checkpoint import ShardRef
from ..domain.errors import EverstepError
from ..domain.generation import Answer
from ..domain.ids import Device, Generation, NodeId, Step

FORMAT = 2
PACKS = "packs"
STATE = ("p", "m", "v")
GRADIENT = ("g",)
RAW, ZSTD, PLANES = "raw", "zstd", "planes"
CODINGS = (RAW, ZSTD, PLANES)
ITEM_BYTES = 4
_PACK = re.compile(r"[A-Za-z0-9_.-]+/\d{8,}\.g\d+(?:\.\d+)?\.pack")
_INDEX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.json")
_HASH = re.compile(r"[0-9a-f]{32,64}")


class CheckpointCorrupt(EverstepError):
    """A file of a committed checkpoint is missing or is not what was written."""


class CheckpointTooNew(CheckpointCorrupt):
    """A newer version wrote it: nothing is wrong with it, and this version must neither read nor remove it."""


class CheckpointAway(CheckpointCorrupt):
    """Where it is cannot be reached now, which says nothing of what is there: it is neither distrusted nor removed."""


_AWAY = frozenset(
    {
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN),
        *(errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN, errno.EREMOTEIO),
        *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY, errno.EAGAIN, errno.ENODEV),
    }
)
"""What a server that does not answer, a mount that is gone or a process at its limits says. EIO is not among it: a disk
says that of a place that it has lost."""


def unread(what: str, error: OSError) -> CheckpointCorrupt:
    """Of something that cannot be read, whether it is damaged or only away."""
    if error.errno in _AWAY:
        return CheckpointAway(f"{what} cannot be reached: {error}; bring its storage back")
    return CheckpointCorrupt(f"{what} cannot be read: {error}; restore an older checkpoint")


@dataclass(frozen=True, slots=True)
class IndexedPiece:
    """Elements start..stop-1 of one kind of a line, stored as `length` bytes from `offset` of a pack on.

    content: hash of the fp32 elements; stored: of the bytes in the pack, the same where the coding is raw.
    """

    line: str
    kind: str
    start: int
    stop: int
    pack: str
    offset: int
    length: int
    coding: str
    content: str
    stored: str

    @property
    def content_bytes(self) -> int:
        return (self.stop - self.start) * ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """packs: each that a piece lies in -> its size in bytes; new_bytes: of those, what this save wrote."""

    device: Device
    step: Step
    generation: Generation
    answer: Answer | None
    kinds: tuple[str, ...]
    lines: Mapping[str, int]
    packs: Mapping[str, int]
    new_bytes: int
    pieces: tuple[IndexedPiece, ...]


def pack_name(stem: str, step: Step, generation: Generation, attempt: int) -> str:
    """Relative to the folder of packs. attempt: 0, and one more for each earlier one that may have left a file."""
    return f"{stem}/{step:08d}.g{generation}{f'.{attempt}' if attempt else ''}.pack"


def index_name(stem: str, attempt: int) -> str:
    return f"{stem}{f'.{attempt}' if attempt else ''}.json"


def file_stem(device: Device) -> str:
    """Unlike for unlike devices, whatever characters a node's name has."""
    mark = hashlib.sha256(str(device).encode()).hexdigest()[:8]
    return f"{_plain(device.node)}.{device.index}.{mark}"


def own_folder(local: str, node: NodeId, checkpoints: Path) -> Path:
    """On a node's own disk, for copies of packs of the checkpoints in a folder. local: the job's checkpoint.local."""
    of_node = f"{_plain(node)}.{hashlib.sha256(node.encode()).hexdigest()[:8]}"
    return Path(local) / of_node / hashlib.sha256(str(checkpoints).encode()).hexdigest()[:16]


def _plain(node: NodeId) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in node).lstrip(".") or "_"


def pack_path(checkpoint: Path, pack: str) -> Path:
    """checkpoint: the directory of a manifest; packs lie beside it, for all checkpoints of a job."""
    return checkpoint.parent / PACKS / pack


def is_index_name(name: str) -> bool:
    return bool(_INDEX.fullmatch(name))


def encode(index: Index) -> bytes:
    lines = {name: number for number, name in enumerate(index.lines)}
    packs = {name: number for number, name in enumerate(index.packs)}
    return json.dumps(
        {
            "format": FORMAT,
            "device": [index.device.node, index.device.index],
            "step": index.step,
            "generation": index.generation,
            "answer": codec.encode(index.answer),
            "kinds": index.kinds,
            "lines": list(index.lines.items()),
            "packs": list(index.packs.items()),
            "new_bytes": index.new_bytes,
            "pieces": [
                [
                    *(lines[p.line], p.kind, p.start, p.stop, packs[p.pack], p.offset, p.length, p.coding, p.content),
                    *(() if p.coding == RAW else (p.stored,)),
                ]
                for p in index.pieces
            ],
        },
        separators=(",", ":"),
    ).encode()


Wants = Callable[[str, str, int, int], bool]
"""Of a piece's line, kind, start and stop: whether it is of any use."""


def load(checkpoint: Path, shard: ShardRef, wants: Wants | None = None) -> Index:
    """The index that `shard` announced; of its pieces only those that are wanted. Raises CheckpointCorrupt."""
    file, content = checkpoint / shard.index, check(checkpoint, shard)
    try:
        index = _decode(json.loads(content), wants)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointCorrupt(f"{file} cannot be used: {error}; restore an older checkpoint") from error
    if index.device != shard.device:
        raise CheckpointCorrupt(f"{file} is of {index.device}, not of {shard.device}; restore an older checkpoint")
    return index


def check(checkpoint: Path, shard: ShardRef) -> bytes:
    """The index's bytes, which are what was announced. Raises CheckpointCorrupt."""
    if not is_index_name(shard.index):
        raise CheckpointCorrupt(f"{checkpoint} names an index {shard.index!r}, which leads elsewhere; restore an older one")
    file = checkpoint / shard.index
    try:
        content = file.read_bytes()
    except OSError as error:
        raise unread(str(file), error) from error
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise CheckpointCorrupt(f"{file} does not have the hash it was announced with; restore an older checkpoint")
    return content


def check_packs(checkpoint: Path, packs: Mapping[str, int]) -> None:
    """Each is there and as long as when it was written. Raises CheckpointCorrupt, CheckpointAway."""
    for pack, size in packs.items():
        file = pack_path(checkpoint, check_pack_name(pack))
        try:
            found = file.stat().st_size
        except OSError as error:
            raise unread(str(file), error) from error
        if found != size:
            raise CheckpointCorrupt(f"{file} has {found} bytes, it was written with {size}; restore an older checkpoint")


def is_pack_name(name: str) -> bool:
    return bool(_PACK.fullmatch(name)) and not name.startswith(".")


def check_pack_name(name: str) -> str:
    if not is_pack_name(name):
        raise CheckpointCorrupt(f"a pack is called {name!r}, which may lead elsewhere; restore an older checkpoint")
    return name


def check_line_names(names: Iterable[str]) -> None:
    """Names become those of files where a model is exported."""
    for name in names:
        if not name or any(part in ("", ".", "..") for part in name.split("/")) or not name.isprintable() or "\\" in name:
            raise CheckpointCorrupt(f"a line is called {name!r}, which may lead elsewhere; restore an older checkpoint")


def _decode(body: Mapping[str, Any], wants: Wants | None) -> Index:
    node, number = body["device"]
    lines, packs = dict(body["lines"]), dict(body["packs"])
    check_line_names(lines)
    names, stores = tuple(lines), tuple(check_pack_name(pack) for pack in packs)
    pieces = []
    for line, kind, start, stop, pack, offset, length, coding, content, *stored in body["pieces"]:
        if wants is not None and not wants(names[line], kind, start, stop):
            continue
        one = IndexedPiece(
            names[line], kind, start, stop, stores[pack], offset, length, coding, content, stored[0] if stored else content
        )
        _check_piece(one, lines, packs)
        pieces.append(one)
    return Index(
        device=Device(NodeId(node), number),
        step=Step(body["step"]),
        generation=Generation(body["generation"]),
        answer=codec.decode(Answer | None, body["answer"]),
        kinds=tuple(body["kinds"]),
        lines=lines,
        packs=packs,
        new_bytes=body["new_bytes"],
        pieces=tuple(pieces),
    )


def _check_piece(piece: IndexedPiece, lines: Mapping[str, int], packs: Mapping[str, int]) -> None:
    if not type(piece.start) is type(piece.stop) is type(piece.offset) is type(piece.length) is int:
        raise ValueError(f"{piece.kind} of {piece.line} lies nowhere")
    if not 0 <= piece.start < piece.stop <= lines[piece.line]:
        raise ValueError(f"{piece.line} has no elements {piece.start}..{piece.stop - 1}")
    if piece.coding not in CODINGS:
        raise ValueError(f"pieces are coded {piece.coding!r}")
    if not 0 <= piece.offset <= piece.offset + piece.length <= packs[piece.pack]:
        raise ValueError(f"{piece.pack} ends before {piece.kind} of {piece.line}")
    if (piece.coding == RAW) != (piece.length == piece.content_bytes and piece.stored == piece.content):
        raise ValueError(f"{piece.kind} of {piece.line} is not as long as its elements")
    if not (_HASH.fullmatch(piece.content) and (piece.stored is piece.content or _HASH.fullmatch(piece.stored))):
        raise ValueError(f"{piece.kind} of {piece.line} has no hash")
