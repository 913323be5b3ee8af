"""A c10d store without a server, for the backends that insist on a rendezvous.

What one rank sets it sends to every rank it is connected to, over the links that are formed anyway; a rank waits for a key
by waiting for its peers. It lives and ends with its generation, so nothing of an older one can be read. It refuses counters
and deletion, which need one owner whom everybody can reach.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from .links import Links
from .mesh import STORE

LENGTH = struct.Struct("<q")


class LinkStore(Store):
    """Keys and values as seen by one rank. Waiting belongs to the training thread; other threads may look."""

    def __init__(self, links: Links, world: int) -> None:
        """world: ranks from there on are donors: they read nothing, and unread bytes make their close a reset."""
        super().__init__()
        self._links = links
        self._world = world
        self._seen: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        name = key.encode()
        with self._lock:
            self._seen[key] = data
        frame = memoryview(LENGTH.pack(len(name)) + name + data)
        pending = self._links.pending()
        for peer in [peer for peer in self._links.peers if peer < self._world]:
            self._links.send(peer, STORE, 0, frame, pending)
        self._links.wait(pending.seal())

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._lock:
            return self._seen[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._seen for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until every key has been set by somebody; the generation's abort ends it. Raises Aborted, PeerLost."""
        self._note(self._links.collect(STORE, 0, wait=False))
        while not self.check(keys):
            self._note(self._links.collect(STORE, 0, wait=True))

    def num_keys(self) -> int:
        with self._lock:
            return len(self._seen)

    def has_extended_api(self) -> bool:
        return True

    def add(self, key: str, value: int) -> int:
        raise NotImplementedError(f"this store has no counters ({key!r}); use a collective of the generation")

    def delete_key(self, key: str) -> bool:
        raise NotImplementedError(f"this store deletes nothing ({key!r}); it ends with its generation")

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        raise NotImplementedError(f"this store cannot compare and set ({key!r}); use a collective of the generation")

    def _note(self, frames: list[bytes]) -> None:
        for frame in frames:
            end = LENGTH.size + LENGTH.unpack_from(frame)[0]
            with self._lock:
                self._seen[frame[LENGTH.size : end].decode()] = frame[end:]
