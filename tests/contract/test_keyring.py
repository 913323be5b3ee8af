"""What a keyring promises, in memory and on Redis; and that Redis never learns what anybody carries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from api.identities import Identities
from api.tokens import digest, mint
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.memory_keyring import MemoryKeyring
from orchestrator.adapters.redis_keyring import KEPT_S, RedisKeyring
from orchestrator.domain.access import AuditEntry, Role, Token
from orchestrator.domain.errors import NotFound, Refused
from orchestrator.ports import MAX_PASSES, Keyring

pytestmark = pytest.mark.timeout(60)
ENTRY = AuditEntry(
    at=1.0,
    principal="tok-1",
    name="ci",
    source="127.0.0.1",
    method="POST",
    operation="submit",
    path="/api/v1/jobs",
    status=201,
    request_id="r",
)


@pytest.fixture(scope="module", params=["memory", "redis"])
def redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis | None]:
    if request.param == "memory":
        yield None
        return
    found = EmbeddedRedis(tmp_path_factory.mktemp("keyring"))
    found.start()
    yield found
    found.stop()


def holding(test: Callable[[Keyring], Awaitable[None]]) -> Callable[[EmbeddedRedis | None], None]:
    def run(redis: EmbeddedRedis | None) -> None:
        async def whole() -> None:
            if redis is None:
                await test(MemoryKeyring(time.time))
                return
            keyring = RedisKeyring(redis.address)
            await keyring._clients.writes.flushall()
            try:
                await test(keyring)
            finally:
                await keyring.close()

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def a_token(id: str, digest: str = "", at: float = 1.0, **changes: object) -> Token:
    made = Token(id=id, name=id, digest=digest or f"d-{id}", roles=(Role.VIEWER,), created_at=at)
    return replace(made, **changes)  # type: ignore[arg-type]


@holding
async def test_a_token_is_found_by_what_it_hashes_to_and_by_its_id(keyring: Keyring) -> None:
    one, two = a_token("tok-1", at=2.0), a_token("tok-2", at=3.0, projects=("mine",), expires_at=9.0)
    for token in (one, two):
        await keyring.add_token(token)
    assert await keyring.token_with("d-tok-2") == await keyring.token("tok-2") == two
    assert await keyring.token_with("d-tok-3") is None and await keyring.token("tok-3") is None
    await keyring.note_use("tok-1", 5.5)
    assert await keyring.tokens() == ((one, 5.5), (two, None))


@holding
async def test_what_was_revoked_stays_so_and_says_since_when(keyring: Keyring) -> None:
    await keyring.add_token(a_token("tok-1"))
    assert (await keyring.revoke("tok-1", 7.0)).revoked_at == 7.0
    assert (await keyring.revoke("tok-1", 8.0)).revoked_at == 7.0
    found = await keyring.token_with("d-tok-1")
    assert found is not None and not found.is_valid(7.0)
    with pytest.raises(NotFound):
        await keyring.revoke("tok-2", 8.0)


@holding
async def test_a_pass_is_good_for_its_time_and_once_where_it_is_asked_so(keyring: Keyring) -> None:
    await keyring.add_pass("code", "d", "tok-1", 60)
    await keyring.add_pass("session", "d", "tok-2", 60)
    assert await keyring.pass_of("session", "d") == await keyring.pass_of("session", "d") == "tok-2"
    assert await keyring.pass_of("code", "d", once=True) == "tok-1"
    assert await keyring.pass_of("code", "d", once=True) is None
    await keyring.end_pass("session", "d")
    assert await keyring.pass_of("session", "d") is None
    await keyring.add_pass("session", "e", "tok-2", 1)
    await asyncio.sleep(1.2)
    assert await keyring.pass_of("session", "e") is None


@holding
async def test_who_signs_in_again_and_again_ends_his_oldest_sessions_and_nobody_elses(keyring: Keyring) -> None:
    await keyring.add_pass("session", "other", "tok-2", 60)
    await keyring.add_pass("code", "c", "tok-1", 60)
    for number in range(MAX_PASSES):
        await keyring.add_pass("session", f"s{number}", "tok-1", 60)
    await keyring.end_pass("session", "s5")
    await keyring.add_pass("session", "one more", "tok-1", 60)
    assert await keyring.pass_of("session", "s0") == "tok-1", "what was signed out of makes room"
    for number in range(2):
        await keyring.add_pass("session", f"and {number}", "tok-1", 60)
    kept = [await keyring.pass_of("session", f"s{number}") for number in range(MAX_PASSES)]
    assert [number for number, holder in enumerate(kept) if holder is None] == [0, 1, 5]
    assert await keyring.pass_of("session", "other") == "tok-2" and await keyring.pass_of("code", "c") == "tok-1"
    if isinstance(keyring, RedisKeyring):
        for key in await keyring._clients.reads.keys("*"):
            assert 0 < await keyring._clients.reads.ttl(key) <= 60


@holding
async def test_the_record_is_read_from_its_end_page_by_page(keyring: Keyring) -> None:
    for number in range(5):
        await keyring.record(replace(ENTRY, at=float(number)))
    first = await keyring.audit(2, None)
    rest = await keyring.audit(10, first[-1][0])
    assert [entry.at for _, entry in (*first, *rest)] == [4.0, 3.0, 2.0, 1.0, 0.0]
    with pytest.raises(Refused, match="no entry of the audit log"):
        await keyring.audit(1, "+")


@holding
async def test_no_text_that_anybody_carries_is_kept(keyring: Keyring) -> None:
    known = Identities(keyring, "", time.time)
    text = mint()
    await keyring.add_token(a_token("tok-1", digest(text)))
    principal = await known.of_token(text)
    assert principal is not None and principal.id == "tok-1"
    session, code = await known.open_session(principal), await known.make_code(principal)
    assert await known.of_session(session) == principal and await known.of_code(code) == principal
    assert await known.of_code(code) is None and await known.of_session("guessed") is None
    if not isinstance(keyring, RedisKeyring):
        return
    redis = keyring._clients.reads
    for key in await redis.keys("*"):
        kept = key + (await redis.dump(key) or b"")
        assert not any(one.encode() in kept for one in (text, text[5:40], session, code))


@holding
async def test_tokens_that_ended_long_ago_are_forgotten(keyring: Keyring) -> None:
    if not isinstance(keyring, RedisKeyring):
        pytest.skip("the one in memory forgets nothing")
    now = time.time()
    await keyring.add_token(a_token("tok-1", at=now, revoked_at=now - KEPT_S - 1))
    await keyring.add_token(a_token("tok-2", at=now, expires_at=now - KEPT_S + 60))
    await keyring.add_token(a_token("tok-3", at=now))
    assert [token.id for token, _ in await keyring.tokens()] == ["tok-2", "tok-3"]
    assert await keyring.token_with("d-tok-1") is None
