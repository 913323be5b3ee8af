"""Who somebody is by what they carry: the state folder's own token, a token of the keyring, or a browser's session.

Answers are remembered for less than a second, so that a stream of requests costs the store little and a revoked token is
refused within that second. It refuses to know HTTP.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from orchestrator.domain.access import LOCAL, Principal
from orchestrator.domain.errors import Unavailable
from orchestrator.ports import Keyring

from .tokens import digest, is_whole

REMEMBERED_S = 0.5
NOTED_EVERY_S = 60.0
"""When a token was last used is written down this often at most."""
SESSION_S = 12 * 3600
CODE_S = 600
SESSION, CODE = "session", "code"
MAX_REMEMBERED = 10_000


class Identities:
    """local_digest: of the state folder's own token, "" where there is none. clock: seconds since the epoch."""

    def __init__(self, keyring: Keyring, local_digest: str, clock: Callable[[], float]) -> None:
        self._keyring = keyring
        self._local = local_digest
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Principal | None]] = OrderedDict()
        self._noted: dict[str, float] = {}

    async def of_token(self, text: str) -> Principal | None:
        """None for what is no token, unknown, revoked or run out. Raises Unavailable."""
        if not is_whole(text):
            return None
        hashed = digest(text)
        if self._local and hmac.compare_digest(hashed, self._local):
            return LOCAL
        return await self._remembered(hashed, lambda: self._look_up(hashed))

    async def of_session(self, text: str) -> Principal | None:
        """Raises Unavailable."""
        hashed = digest(text)
        return await self._remembered(f"{SESSION}:{hashed}", lambda: self._holder_of(hashed))

    async def open_session(self, principal: Principal) -> str:
        """What the browser is to carry."""
        text = secrets.token_urlsafe(32)
        await self._keyring.add_pass(SESSION, digest(text), self._holder(principal), SESSION_S)
        return text

    async def end_session(self, text: str) -> None:
        await self._keyring.end_pass(SESSION, digest(text))
        self._known.pop(f"{SESSION}:{digest(text)}", None)

    async def make_code(self, principal: Principal) -> str:
        """Good once, for CODE_S: lets somebody sign in as `principal` without its token."""
        text = secrets.token_urlsafe(32)
        await self._keyring.add_pass(CODE, digest(text), self._holder(principal), CODE_S)
        return text

    async def of_code(self, text: str) -> Principal | None:
        holder = await self._keyring.pass_of(CODE, digest(text), once=True)
        return await self._of_id(holder) if holder else None

    def forget(self) -> None:
        """What was remembered is out of date: something was revoked here."""
        self._known.clear()

    def _holder(self, principal: Principal) -> str:
        """The owner's by the token's hash, so that what was opened with it ends when that file is replaced."""
        return f"{LOCAL.id}:{self._local}" if principal.id == LOCAL.id else principal.id

    # --- looking up -------------------------------------------------------------------------------------------------------

    async def _remembered(self, key: str, look_up: Callable[[], Awaitable[Principal | None]]) -> Principal | None:
        now = self._clock()
        known = self._known.get(key)
        if known is not None and 0 <= now - known[0] < REMEMBERED_S:
            return known[1]
        found = await look_up()
        self._known[key] = (now, found)
        self._known.move_to_end(key)
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found

    async def _look_up(self, hashed: str) -> Principal | None:
        token = await self._keyring.token_with(hashed)
        if token is None or not hmac.compare_digest(token.digest, hashed) or not token.is_valid(self._clock()):
            return None
        await self._note_use(token.id)
        return token.principal

    async def _holder_of(self, hashed: str) -> Principal | None:
        holder = await self._keyring.pass_of(SESSION, hashed)
        return await self._of_id(holder) if holder else None

    async def _of_id(self, id: str) -> Principal | None:
        """A session is good for as long as the token that it was opened with."""
        if id.partition(":")[0] == LOCAL.id:
            return LOCAL if self._local and id == self._holder(LOCAL) else None
        token = await self._keyring.token(id)
        if token is None or not token.is_valid(self._clock()):
            return None
        await self._note_use(token.id)
        return token.principal

    async def _note_use(self, id: str) -> None:
        now = self._clock()
        if now - self._noted.get(id, 0.0) < NOTED_EVERY_S:
            return
        self._noted[id] = now
        try:
            await self._keyring.note_use(id, now)
        except Unavailable:
            del self._noted[id]
