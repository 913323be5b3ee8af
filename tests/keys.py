"""A server that asks who one is, over a keyring that a test fills, and clients that hold its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from api.identities import Identities
from api.tokens import digest, mint
from orchestrator.adapters.memory_keyring import MemoryKeyring
from orchestrator.domain.access import Role, Token

from .served import Served, serve


@dataclass
class Guarded:
    served: Served
    keyring: MemoryKeyring
    owner: str
    """The state folder's own token."""
    clients: list[httpx2.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.served.url

    def let_pass(self, seconds: float) -> None:
        """For those who ask what time it is before they believe a token."""
        known: Identities = self.served.server.config.app.state.identities  # type: ignore[union-attr]
        now = known._clock
        known._clock = lambda: now() + seconds

    def token(self, name: str, *roles: Role, projects: Sequence[str] = (), lasts_s: float | None = None) -> str:
        text, now = mint(), time.time()
        made = Token(
            id=f"tok-{name}",
            name=name,
            digest=digest(text),
            roles=roles,
            projects=tuple(projects),
            created_at=now,
            expires_at=None if lasts_s is None else now + lasts_s,
        )
        asyncio.run(self.keyring.add_token(made))
        return text

    def http(self, token: str | None, **headers: str) -> httpx2.Client:
        """Kept open until the server goes."""
        given = {"Authorization": f"Bearer {token}"} if token else {}
        client = httpx2.Client(base_url=self.url, trust_env=False, headers=given | headers, timeout=60)
        self.clients.append(client)
        return client


@contextmanager
def guarded(state_dir: Path, **changes: Any) -> Iterator[Guarded]:
    keyring, owner = MemoryKeyring(time.time), mint()
    with serve(state_dir, keyring=keyring, local_digest=digest(owner), **changes) as served:
        found = Guarded(served, keyring, owner)
        try:
            yield found
        finally:
            for client in found.clients:
                client.close()
