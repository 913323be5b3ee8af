"""What hides a job's secrets in anything that leaves its processes: values are known here for as long as they must be
hidden, and written nowhere.

A name is what a job file says, a value what its processes find in their environment. It refuses to know where values are
kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

BLOT = "[redacted]"
SHORTEST = 8
"""Characters of a value: a shorter one would be hidden in half of all words."""
LONGEST = 65536
_HINT_BYTES = 4
"""Of a value's beginning at the end of a text: it may go on with the next piece."""
T = TypeVar("T")


def _begun(hidden: bytes, data: bytes) -> int:
    """How much of it data ends with, short of the whole; 0 where that is too little to tell."""
    tail, hint = data[-(len(hidden) - 1) :], hidden[:_HINT_BYTES]
    at = tail.find(hint)
    while at != -1 and not hidden.startswith(tail[at:]):
        at = tail.find(hint, at + 1)
    return 0 if at == -1 else len(tail) - at


class Veil:
    """Covers these values, and of one with several lines each long enough line too. Without values it changes nothing."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        whole = {value for value in values if value}
        lines = {line for value in whole for line in value.splitlines() if len(line.strip()) >= SHORTEST}
        self._hidden = sorted({*whole, *lines}, key=len, reverse=True)
        self._bytes = tuple(hidden.encode() for hidden in self._hidden)

    def __bool__(self) -> bool:
        return bool(self._hidden)

    @property
    def reach(self) -> int:
        """Bytes around a piece of a text that must be looked at too, so that a value across its edge is found."""
        return max((len(hidden) - 1 for hidden in self._bytes), default=0)

    def over_text(self, text: str) -> str:
        for hidden in self._hidden:
            text = text.replace(hidden, BLOT)
        return text

    def over_bytes(self, data: bytes) -> bytes:
        """Of the same length, so that places in it stay what they were; what may be the beginning of a value is covered."""
        for hidden in self._bytes:
            data = data.replace(hidden, b"*" * len(hidden))
        for hidden in self._bytes:
            if begun := _begun(hidden, data):
                data = data[:-begun] + b"*" * begun
        return data

    def places(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Where each whole value begins in it, and how many bytes it has."""
        for hidden in self._bytes:
            at = data.find(hidden)
            while at != -1:
                yield at, len(hidden)
                at = data.find(hidden, at + 1)

    def over(self, value: T) -> T:
        """The same value with every text in it covered: dataclasses, mappings and tuples are gone through."""
        covered: T = self._covered(value)
        return covered if self._hidden else value

    def _covered(self, value: Any) -> Any:
        match value:
            case str():
                return self.over_text(value)
            case tuple():
                # Also one with a name: a Device is made anew as what it is.
                parts = [self._covered(item) for item in value]
                return tuple(parts) if type(value) is tuple else value
            case Mapping():
                return {key: self._covered(item) for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            now = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
            covered = {name: self._covered(item) for name, item in now.items()}
            changed = {name: item for name, item in covered.items() if item != now[name]}
            return dataclasses.replace(value, **changed) if changed else value
        return value
