"""Text the user names, as one run of byte tokens: which files, in which order, and what is refused.

The result is a pure function of the files and the spec. It knows nothing of samples, steps or ranks.
"""

from __future__ import annotations

import hashlib
import json
import stat
import sysconfig
from collections.abc import Iterator
from glob import escape, iglob
from pathlib import Path

import torch

from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.spec import DataSpec

SUFFIXES = (".txt", ".py", ".md", ".jsonl")
STDLIB = "{stdlib}"
SEPARATOR = b"\0"
"""Between documents."""

_NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__")


def load(data: DataSpec, *, for_everybody: bool = False) -> torch.Tensor:
    """The text as uint8 tokens (N,), files in order of path, documents separated by a 0 byte. Raises Refused.

    for_everybody: who reads it may read more than whoever is given it, so files that only some may read are refused.
    """
    if data.max_bytes is not None and data.max_bytes < 1:
        raise _refused("max_bytes", data.max_bytes, f"is {data.max_bytes} and must be at least 1; leave it out to read all")
    text = bytearray()
    for path in _files(data):
        if for_everybody:
            _require_open(path, data)
        for document in _documents(path, data, None if data.max_bytes is None else data.max_bytes - len(text)):
            text += SEPARATOR + document if text else document
            if data.max_bytes is not None and len(text) >= data.max_bytes:
                return _tokens(text[: data.max_bytes])
    if not text:
        raise _refused("files", data.files, f"names only empty files ({', '.join(data.files)}); name some with text")
    return _tokens(text)


def digest(tokens: torch.Tensor) -> str:
    """sha256 of the text."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def require_same(tokens: torch.Tensor, wanted: str) -> None:
    """Samples are named by their place in the text: on another text they would be others. Raises Refused."""
    if wanted and (found := digest(tokens)) != wanted:
        raise Refused(
            f"the text here (sha256 {found[:12]}) is not the one the job was described with ({wanted[:12]}); "
            "give every node the same files"
        )


def num_samples(tokens: torch.Tensor, sequence: int) -> int:
    """Samples of sequence + 1 tokens, each beginning at the last token of the one before. Raises Refused for none."""
    samples = (len(tokens) - 1) // sequence
    if samples < 1:
        raise Refused(
            f"the text has {len(tokens)} bytes and one sample needs {sequence + 1}; name more text or lower train.sequence",
            (FieldProblem(field="train.sequence", value=sequence, message=f"needs {sequence + 1} bytes of text"),),
        )
    return samples


def byte_unigram_entropy(tokens: torch.Tensor) -> float:
    """Entropy of the bytes' frequencies, in nats: the loss of a model that knows those and nothing else."""
    counts = torch.bincount(tokens, minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def _files(data: DataSpec) -> list[Path]:
    """Every file any glob names, once, by path."""
    found: set[Path] = set()
    for pattern in data.files:
        matches = list(_matches(pattern))
        if not matches:
            raise _refused("files", pattern, f"names {pattern!r}, which matches no file; check the path")
        found.update(matches)
    if not found:
        raise _refused("files", data.files, "is empty; name at least one file or glob")
    for path in sorted(found):
        if path.suffix not in SUFFIXES:
            allowed = ", ".join(SUFFIXES)
            raise _refused("files", str(path), f"names {path}, which is none of {allowed}; narrow the glob", allowed)
    return sorted(found)


def _matches(pattern: str) -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # Path.glob takes no absolute patterns.
    for name in iglob(pattern.replace(STDLIB, escape(str(root))), recursive=True):  # noqa: PTH207
        path = Path(name)
        installed = path.is_relative_to(root) and any(part in _NOT_STDLIB for part in path.relative_to(root).parts)
        if path.is_file() and not (STDLIB in pattern and installed):
            yield path


def _require_open(path: Path, data: DataSpec) -> None:
    try:
        is_open = path.stat().st_mode & stat.S_IROTH
    except OSError:
        return  # said where it is read
    if not is_open:
        said = f"names {path}, which only some users may read, and jobs run as another; chmod a+r it, or jobs.user: service"
        raise _refused("files", str(path), said)


def _documents(path: Path, data: DataSpec, limit: int | None) -> Iterator[bytes]:
    """Non-empty documents of one file; of a plain one no more than `limit` bytes are read."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".jsonl":
                for number, record in enumerate(file, start=1):
                    if record.strip() and (document := _text_of(record, f"{path}:{number}", data.text_field)):
                        yield document
            elif document := file.read(-1 if limit is None else limit):
                yield document
            elif str(path) in data.files:
                # An empty __init__.py under a glob is nothing to complain about; a file named outright is.
                raise _refused("files", str(path), f"names {path}, which is empty; name a file with text")
    except OSError as error:
        message = f"names {path}, which cannot be read ({error.strerror}); make it readable or leave it out"
        raise _refused("files", str(path), message) from error


def _text_of(record: bytes, place: str, text_field: str) -> bytes:
    try:
        value = json.loads(record)
    except ValueError as error:
        raise _refused("files", place, f"has {place}, which is not JSON ({error}); write one object a line") from error
    text = value.get(text_field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        message = f"is {text_field!r}, but {place} has no text under that name; set it to the field that holds the text"
        raise _refused("text_field", text_field, message)
    return text.encode("utf-8", "surrogatepass")


def _tokens(text: bytearray) -> torch.Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)


def _refused(field: str, value: object, said: str, allowed: str | None = None) -> Refused:
    message = f"data.{field} {said}"
    return Refused(message, (FieldProblem(field=f"data.{field}", value=value, message=message, allowed=allowed),))
