"""The keyring in memory, with the meaning of the Redis one and none of its durability. For tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.domain.access import AuditEntry, Token
from orchestrator.domain.errors import NotFound
from orchestrator.ports import MAX_PASSES

from .redis_keyring import require_id


class MemoryKeyring:
    """clock: seconds since the epoch, for passes that run out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens: dict[str, Token] = {}
        self._used: dict[str, float] = {}
        self._passes: dict[tuple[str, str], tuple[str, float]] = {}
        self.entries: list[AuditEntry] = []

    async def add_token(self, token: Token) -> None:
        self._tokens[token.id] = token

    async def tokens(self) -> tuple[tuple[Token, float | None], ...]:
        return tuple((token, self._used.get(token.id)) for token in self._tokens.values())

    async def token(self, id: str) -> Token | None:
        return self._tokens.get(id)

    async def token_with(self, digest: str) -> Token | None:
        return next((token for token in self._tokens.values() if token.digest == digest), None)

    async def revoke(self, id: str, at: float) -> Token:
        if id not in self._tokens:
            raise NotFound(f"there is no token {id}; list the tokens to see what there is")
        token = self._tokens[id]
        self._tokens[id] = replace(token, revoked_at=token.revoked_at or at)
        return self._tokens[id]

    async def note_use(self, id: str, at: float) -> None:
        self._used[id] = at

    async def add_pass(self, kind: str, digest: str, holder: str, ttl_s: int) -> None:
        now = self._clock()
        self._passes[kind, digest] = (holder, now + ttl_s)
        alive = [key for key, (who, until) in self._passes.items() if (key[0], who) == (kind, holder) and now < until]
        for key in alive[:-MAX_PASSES]:
            del self._passes[key]

    async def pass_of(self, kind: str, digest: str, *, once: bool = False) -> str | None:
        found = self._passes.pop((kind, digest), None) if once else self._passes.get((kind, digest))
        return found[0] if found and self._clock() < found[1] else None

    async def end_pass(self, kind: str, digest: str) -> None:
        self._passes.pop((kind, digest), None)

    async def record(self, entry: AuditEntry) -> None:
        self.entries.append(entry)

    async def audit(self, limit: int, before: str | None) -> tuple[tuple[str, AuditEntry], ...]:
        below = len(self.entries) if before is None else int(require_id(before).partition("-")[0])
        numbers = range(below - 1, max(-1, below - 1 - limit), -1)
        return tuple((f"{number}-0", self.entries[number]) for number in numbers)
