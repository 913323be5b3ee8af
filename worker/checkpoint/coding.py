"""How a piece's fp32 elements become the bytes of a pack, and back: as they are, compressed, or cut in planes first.

    planes   | header | exponents: byte 3 of each element | byte 2 of each | bytes 0 and 1 of each |

Of a trained state the mantissas are noise and the exponents are not: side by side these compress to a third, and what is
noise is stored as it is. It owns hash and codings and decides from a sample which one pays; it knows no lines and no files.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from orchestrator.adapters.index import ITEM_BYTES, PLANES, RAW, ZSTD

LEVEL = 1
"""Of zstd: higher ones gain under 1 % on exponents and take two to four times as long."""
PAYS = 0.83
"""Stored bytes over content bytes, above which a coding is not worth its time: decoding takes three times as long as
reading does, and all of a state is read whenever a job is restored."""
PAYS_ONCE = 0.92
"""The same for what is written at every step and hardly ever read: gradients."""
SAMPLE = 1 << 14
"""Elements that a coding is chosen from."""
SMALL = 1 << 10
"""Elements below which a piece is stored as it is."""
_HEADER = struct.Struct("<BIII")
"""Which planes are compressed, as bits, and how long each is."""


def digest(content: bytes | memoryview) -> str:
    """128 bits of BLAKE3, in hex: several times as fast as SHA-256 where a processor has no instructions for that one."""
    return blake3(content).hexdigest(length=16)


@dataclass(frozen=True, slots=True)
class Coding:
    """name: of CODINGS; planes: which to compress, as bits (exponents 1, byte 2 of each element 2, the rest 4)."""

    name: str = RAW
    planes: int = 0


class Coder:
    """Encodes and decodes one piece after another. Not for two threads at once."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()

    def choose(self, content: NDArray[np.uint8], pays: float = PAYS) -> Coding:
        """What pays for content like this. content: the bytes of fp32 elements; pays: PAYS or PAYS_ONCE."""
        elements = content.size // ITEM_BYTES
        if elements < SMALL:
            return Coding()
        low = max(0, (elements - SAMPLE) // 2) * ITEM_BYTES
        sample = content[low : low + SAMPLE * ITEM_BYTES]
        whole = len(self._compressor.compress(sample.data)) / sample.size
        planes, cost = 0, 0.0
        for number, plane in enumerate(_planes(sample)):
            ratio = len(self._compressor.compress(plane.data)) / plane.size
            is_shorter = ratio < PAYS_ONCE
            planes |= is_shorter << number
            cost += (ratio if is_shorter else 1.0) * plane.size / sample.size
        if whole < pays and whole <= cost:
            return Coding(ZSTD)
        return Coding(PLANES, planes) if cost < pays else Coding()

    def encode(self, content: NDArray[np.uint8], coding: Coding) -> tuple[str, bytes | memoryview]:
        """The coding that was used in the end, and the bytes: raw where the chosen one makes them no shorter."""
        if coding.name == ZSTD:
            stored = self._compressor.compress(content.data)
        elif coding.name == PLANES:
            parts = [
                self._compressor.compress(plane.data) if coding.planes >> number & 1 else plane.data
                for number, plane in enumerate(_planes(content))
            ]
            stored = b"".join((_HEADER.pack(coding.planes, *(len(part) for part in parts)), *parts))
        else:
            return RAW, content.data
        return (coding.name, stored) if len(stored) < content.size else (RAW, content.data)

    def decode(self, name: str, stored: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
        """Fill `into` with the content. Raises ValueError where `encode` makes no such bytes of as much content."""
        if name == RAW:
            into[:] = stored
        elif name == ZSTD:
            into[:] = self._expand(stored, into.size)
        elif name == PLANES:
            self._join(stored, into)
        else:
            raise ValueError(f"no coding is called {name!r}")

    def _join(self, stored: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
        if stored.size < _HEADER.size:
            raise ValueError("there is no header")
        compressed, *lengths = _HEADER.unpack(stored[: _HEADER.size].data)
        if _HEADER.size + sum(lengths) != stored.size:
            raise ValueError("the planes are not as long as the header says")
        at = _HEADER.size
        for number, plane in enumerate(_targets(into)):
            length = lengths[number]
            part = stored[at : at + length]
            size = plane.size * plane.itemsize
            if compressed >> number & 1:
                part = self._expand(part, size)
            elif part.size != size:
                raise ValueError(f"plane {number} has {part.size} bytes of {size}")
            plane[:] = np.frombuffer(part, dtype=plane.dtype)
            at += length

    def _expand(self, part: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
        try:
            if zstandard.frame_content_size(part.data) != size:
                raise ValueError(f"they are not compressed from {size} bytes")
            content = self._decompressor.decompress(part.data, max_output_size=size)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        if len(content) != size:
            raise ValueError(f"they expand to {len(content)} bytes of {size}")
        return np.frombuffer(content, dtype=np.uint8)


def _planes(content: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], ...]:
    return tuple(np.ascontiguousarray(plane).view(np.uint8) for plane in _targets(content))


def _targets(content: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Views of the planes where they lie among the elements."""
    return content[3::4], content[2::4], content.view(np.uint16)[::2]
