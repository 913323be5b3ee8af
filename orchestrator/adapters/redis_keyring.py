"""Tokens, sessions and the audit log on Redis. Holds hashes of what people carry; their text is never sent here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.domain import codec
from orchestrator.domain.access import AuditEntry, Token
from orchestrator.domain.errors import Conflict, NotFound, Refused
from orchestrator.ports import MAX_PASSES

from . import redis_keys as keys
from . import redis_scripts as scripts
from .redis_clients import RedisAddress, RedisClients, text, unavailable

MAX_TOKENS = 1000
KEPT_S = 30 * 86400
"""A token that was revoked or ran out is listed for so long."""
AUDIT_CAP = 100_000


class RedisKeyring:
    def __init__(self, address: RedisAddress, *, timeout_s: float = 2.0) -> None:
        self._clients = RedisClients(address, timeout_s)

    async def close(self) -> None:
        await self._clients.close()

    # --- tokens -----------------------------------------------------------------------------------------------------------

    async def add_token(self, token: Token) -> None:
        await self._forget_old(token.created_at)
        writes: Any = self._clients.writes
        with unavailable(self._clients.address):
            if await writes.hlen(keys.TOKENS) >= MAX_TOKENS:
                raise Conflict(f"there are {MAX_TOKENS} tokens, the most that are kept; revoke some that are not used")
            async with writes.pipeline(transaction=True) as pipeline:
                pipeline.hset(keys.TOKENS, token.id, codec.dumps(token))
                pipeline.hset(keys.TOKENS_BY, token.digest, token.id)
                await pipeline.execute()

    async def tokens(self) -> tuple[tuple[Token, float | None], ...]:
        reads: Any = self._clients.reads
        with unavailable(self._clients.address):
            found, used = await reads.hgetall(keys.TOKENS), await reads.hgetall(keys.TOKENS_USED)
        tokens = [codec.loads(Token, data) for data in found.values()]
        last = {text(id): float(at) for id, at in used.items()}
        tokens.sort(key=lambda token: (token.created_at, token.id))
        return tuple((token, last.get(token.id)) for token in tokens)

    async def token(self, id: str) -> Token | None:
        reads: Any = self._clients.reads
        with unavailable(self._clients.address):
            data = await reads.hget(keys.TOKENS, id)
        return codec.loads(Token, data) if data else None

    async def token_with(self, digest: str) -> Token | None:
        reads: Any = self._clients.reads
        with unavailable(self._clients.address):
            id = await reads.hget(keys.TOKENS_BY, digest)
        return await self.token(text(id)) if id else None

    async def revoke(self, id: str, at: float) -> Token:
        token = await self.token(id)
        if token is None:
            raise NotFound(f"there is no token {id}; list the tokens to see what there is")
        revoked = replace(token, revoked_at=token.revoked_at or at)
        writes: Any = self._clients.writes
        with unavailable(self._clients.address):
            await writes.hset(keys.TOKENS, id, codec.dumps(revoked))
        return revoked

    async def note_use(self, id: str, at: float) -> None:
        writes: Any = self._clients.writes
        with unavailable(self._clients.address):
            await writes.hset(keys.TOKENS_USED, id, repr(at))

    async def _forget_old(self, now: float) -> None:
        old = [token for token, _ in await self.tokens() if _ended_at(token, now) < now - KEPT_S]
        if not old:
            return
        writes: Any = self._clients.writes
        with unavailable(self._clients.address):
            async with writes.pipeline(transaction=True) as pipeline:
                pipeline.hdel(keys.TOKENS, *(token.id for token in old))
                pipeline.hdel(keys.TOKENS_USED, *(token.id for token in old))
                pipeline.hdel(keys.TOKENS_BY, *(token.digest for token in old))
                await pipeline.execute()

    # --- sessions and login links -----------------------------------------------------------------------------------------

    async def add_pass(self, kind: str, digest: str, holder: str, ttl_s: int) -> None:
        names = keys.access_pass(kind, ""), keys.passes_of(kind, holder)
        await self._clients.write(scripts.ADD_PASS, *names, digest, holder, ttl_s, MAX_PASSES)

    async def pass_of(self, kind: str, digest: str, *, once: bool = False) -> str | None:
        name = keys.access_pass(kind, digest)
        with unavailable(self._clients.address):
            # Taken by one command, and never asked for again where the answer was lost: two may not both be let in.
            found = await (self._clients.writes.getdel(name) if once else self._clients.reads.get(name))
        return text(found) if found else None

    async def end_pass(self, kind: str, digest: str) -> None:
        with unavailable(self._clients.address):
            await self._clients.writes.delete(keys.access_pass(kind, digest))

    # --- audit ------------------------------------------------------------------------------------------------------------

    async def record(self, entry: AuditEntry) -> None:
        with unavailable(self._clients.address):
            fields: Any = {keys.ENTRY: codec.dumps(entry)}
            await self._clients.writes.xadd(keys.AUDIT, fields, maxlen=AUDIT_CAP, approximate=True)

    async def audit(self, limit: int, before: str | None) -> tuple[tuple[str, AuditEntry], ...]:
        newest = "+" if before is None else f"({require_id(before)}"
        with unavailable(self._clients.address):
            found: Any = await self._clients.reads.xrevrange(keys.AUDIT, newest, "-", count=limit)
        return tuple((text(id), codec.loads(AuditEntry, fields[keys.ENTRY.encode()])) for id, fields in found)


def require_id(id: str) -> str:
    """Raises Refused for what is no id of the audit log."""
    parts = id.split("-")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and len(part) <= 15 for part in parts):
        raise Refused(f"{id[:100]!r} is no entry of the audit log; use an id that it gave")
    return id


def _ended_at(token: Token, now: float) -> float:
    return min(token.revoked_at or now, token.expires_at or now)
