"""Webhooks over real ports and a real Redis: who is told, once or again, and what nobody is told.

Whoever sends takes a turn when a test says so, by the test's clock: nothing here waits for time to pass.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path

import pytest
import uvicorn
from typer.testing import CliRunner

from api.app import create_app
from api.cli.main import app as command
from api.client import ApiError, AsyncClient
from api.client.webhooks import received
from api.courier import MAX_FLYING_EACH, Courier
from api.routes.hooks import Webhooks
from api.settings import ApiSettings
from api.tokens import digest, mint
from orchestrator.adapters import redis_keys as keys
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.hook_secrets import HookSecretFolder
from orchestrator.adapters.hook_sender import PinnedSender
from orchestrator.adapters.redis_clients import RedisAddress
from orchestrator.adapters.redis_desk import RedisDesk
from orchestrator.adapters.redis_hooks import RedisHooks
from orchestrator.adapters.redis_keyring import RedisKeyring
from orchestrator.adapters.redis_store import RedisStore
from orchestrator.domain.access import Role, Token
from orchestrator.domain.attic import Retention
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.errors import Unavailable
from orchestrator.domain.events import HistoryEntry
from orchestrator.domain.ids import JobId, NodeId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import Cancelled, Failed, Queued, Succeeded
from orchestrator.domain.status import status_of
from orchestrator.notify.addresses import Reach
from orchestrator.notify.retrying import Patience
from orchestrator.ports import Commit
from tests.desk import a_spec
from tests.heard import Receiver, receiving

pytestmark = pytest.mark.timeout(120)
LOOPBACK = Reach(http=True, networks=(ip_network("127.0.0.0/8"),))
PATIENCE = Patience(attempts=3, first_wait_s=10.0, max_failures=2)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    found = EmbeddedRedis(tmp_path_factory.mktemp("webhooks"))
    found.start()
    yield found
    found.stop()


@dataclass
class Service:
    """An API on a real port, and a supervisor's seat."""

    url: str
    owner: str
    client: AsyncClient
    address: RedisAddress
    secrets: HookSecretFolder
    store: RedisStore
    keyring: RedisKeyring
    term: Term
    told: Receiver
    redis_dir: Path
    now: float = field(default_factory=lambda: time.time() + 1e6)
    """Later than what the API says it is, so that what was asked for is due."""
    open: list[RedisHooks | RedisDesk] = field(default_factory=list)

    def courier(self) -> Courier:
        desk, hooks = RedisDesk(self.address), RedisHooks(self.address, kept=20)
        self.open += [desk, hooks]
        sender = PinnedSender(LOOPBACK, timeout_s=30.0)
        return Courier(desk, hooks, self.secrets, sender, PATIENCE, clock=lambda: self.now, chance=lambda: 1.0)

    async def turn(self, courier: Courier, after_s: float = 0.0) -> list[str]:
        """Types of what is told in it."""
        self.now += after_s
        before = len(self.told.messages)
        await courier.turn()
        await courier.settled()
        return [json.loads(one.body)["type"] for one in self.told.messages[before:]]

    async def job(self, id: str, **changes: object) -> JobRecord:
        record = JobRecord(id=JobId(id), spec=replace(a_spec(), **changes), state=Queued(reason="busy"), created_at=1.0)  # type: ignore[arg-type]
        await self.happens(record, "queued", "busy")
        return record

    async def happens(self, record: JobRecord, type: str, message: str) -> None:
        status = status_of(record.state).value
        entry = HistoryEntry(job=record.id, at=time.time(), type=type, message=message, status=status)
        await self.store.commit(self.term, Commit(jobs={record.id: record}, history=(entry,)))

    async def token(self, *roles: Role, projects: tuple[str, ...] = ()) -> str:
        text = mint()
        made = Token(
            id=f"tok-{text[-12:]}", name="one", digest=digest(text), roles=roles, projects=projects, created_at=1.0
        )
        await self.keyring.add_token(made)
        return text


@asynccontextmanager
async def service(root: Path, redis: EmbeddedRedis) -> AsyncIterator[Service]:
    address, owner = redis.address, mint()
    store, desk, keyring, hooks = RedisStore(address), RedisDesk(address), RedisKeyring(address), RedisHooks(address)
    await desk._clients.writes.flushall()
    term = await store.acquire("test", 3600)
    assert term is not None
    secrets = HookSecretFolder(root / "webhook-secrets")
    settings = ApiSettings(state_dir=root, local_digest=digest(owner))
    webhooks = Webhooks(store=hooks, secrets=secrets, reach=LOOPBACK)
    app = create_app(desk, settings, keyring=keyring, webhooks=webhooks)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    folder = redis._directory
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with receiving() as told, AsyncClient(url, token=owner) as client:
        found = Service(url, owner, client, address, secrets, store, keyring, term, told, folder)
        try:
            yield found
        finally:
            server.should_exit = True
            await serving
            for one in (store, desk, keyring, hooks, *found.open):
                await one.close()


def serving(test: Callable[[Service], Awaitable[None]]) -> Callable[[EmbeddedRedis, Path], None]:
    def run(redis: EmbeddedRedis, tmp_path: Path) -> None:
        async def whole() -> None:
            async with service(tmp_path, redis) as found:
                await test(found)

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@serving
async def test_a_hook_is_told_of_what_it_asked_for_signed_and_its_secret_is_nowhere_else(at: Service) -> None:
    before = await at.job("job-before")
    made = await at.client.create_webhook("ops", at.told.url, events=["job.queued", "job.failed"], labels={"team": "a"})
    other = await at.client.create_webhook("all", at.told.url)
    courier = at.courier()
    assert await at.turn(courier) == [], "what happened before is history"
    job = await at.job("job-1", labels={"team": "a"})
    await at.happens(replace(before, state=Succeeded(at=2.0)), "ended", "SUCCEEDED at step 3")
    assert sorted(await at.turn(courier)) == ["job.queued", "job.queued", "job.succeeded"]
    await at.happens(replace(job, state=Failed(at=3.0, message="it raised")), "ended", "FAILED: it raised")
    assert sorted(await at.turn(courier)) == ["job.failed", "job.failed"]
    then = at.now
    assert await at.turn(courier) == [] and await at.turn(courier, 3600.0) == []
    (failed, first) = await at.client.deliveries(made.id)
    assert (failed.event, failed.status, failed.tries, failed.attempts[0].code) == ("job.failed", "delivered", 1, 204)
    assert first.event == "job.queued" and failed.next_try_at is None and len(await at.client.deliveries(other.id)) == 3
    mine = [one for one in at.told.messages if one.headers["webhook-id"] == failed.id]
    event = received(mine[0].headers, mine[0].body, made.secret, now=then)
    assert (
        event.type == "job.failed" and event.data["job"]["id"] == "job-1" and event.data["message"] == "FAILED: it raised"
    )
    with pytest.raises(Exception, match="of this secret"):
        received(mine[0].headers, mine[0].body, other.secret, now=then)

    shown = [
        str(await at.client.webhook(made.id)),
        str(await at.client.webhooks()),
        str(await at.client.deliveries(made.id)),
    ]
    shown += [(await at.client._http.get(path)).text for path in ("/api/v1/audit", "/metrics", "/api/v1/webhooks")]
    # What was ever written to Redis, as it is on its disk: keys' dumps may be packed.
    shown += [file.read_bytes().decode("latin1") for file in at.redis_dir.rglob("*.aof*")]
    assert "create_webhook" in shown[3] and made.id in shown[-1] + shown[-2]
    assert not any(made.secret in one or made.secret[6:] in one for one in shown)
    path = at.secrets.root / made.id
    assert path.read_text() == made.secret and path.stat().st_mode & 0o777 == 0o600
    assert at.secrets.root.stat().st_mode & 0o777 == 0o700
    await at.client.delete_webhook(made.id)
    assert not path.exists() and [one.id for one in await at.client.webhooks()] == [other.id]
    with pytest.raises(ApiError, match="there is no webhook"):
        await at.client.deliveries(made.id)


@serving
async def test_what_is_not_heard_is_sent_again_under_the_same_id_given_up_and_a_dead_hook_is_paused(at: Service) -> None:
    made = await at.client.create_webhook("ops", at.told.url, events=["job.queued"])
    courier = at.courier()
    at.told.answers.extend([500, 302])
    await at.job("job-1")
    assert await at.turn(courier) == ["job.queued"]
    (waits,) = await at.client.deliveries(made.id)
    assert (waits.status, waits.tries, waits.attempts[0].error) == ("pending", 1, "it answered 500")
    assert await at.turn(courier, 9.0) == [], "it is not time yet"
    assert await at.turn(courier, 1.0) == ["job.queued"]
    assert "redirects are not followed" in (await at.client.deliveries(made.id))[0].attempts[-1].error
    assert await at.turn(courier, 40.0) == ["job.queued"]
    assert {one.headers["webhook-id"] for one in at.told.messages} == {waits.id}
    assert {one.line for one in at.told.messages} == {"POST /told HTTP/1.1"}
    assert (await at.client.deliveries(made.id))[0].status == "delivered"

    at.told.always = 503
    for name in ("job-2", "job-3"):
        await at.job(name)
    for _ in range(3):
        await at.turn(courier, 3600.0)
    paused = await at.client.webhook(made.id)
    assert (paused.status, paused.failures) == ("paused", 2) and "2 deliveries in a row were given up" in paused.why
    assert [one.status for one in await at.client.deliveries(made.id)] == ["failed", "failed", "delivered"]
    at.told.always = 204
    await at.job("job-4")
    assert await at.turn(courier, 3600.0) == [], "what happens while it is paused is not told"
    test = await at.client.test_webhook(made.id)
    assert await at.turn(courier) == ["ping"] and test.event == "ping", "whether it would hear can be tried first"
    assert (await at.client.webhook(made.id)).status == "paused"
    assert (await at.client.resume_webhook(made.id)).status == "active"
    failed = (await at.client.deliveries(made.id))[1]
    again = await at.client.redeliver(made.id, failed.id)
    assert again.id == failed.id and await at.turn(courier) == ["job.queued"]
    now = next(one for one in await at.client.deliveries(made.id) if one.id == failed.id)
    assert (now.status, now.tries, len(now.attempts)) == ("delivered", 1, 4)
    with pytest.raises(ApiError, match="has no delivery"):
        await at.client.redeliver(made.id, "msg-none")


@serving
async def test_what_is_pending_waits_while_a_hook_is_paused_and_is_sent_then(at: Service) -> None:
    made = await at.client.create_webhook("ops", at.told.url)
    courier = at.courier()
    at.told.answers.append(500)
    await at.job("job-1")
    await at.turn(courier)
    assert (await at.client.pause_webhook(made.id)).why == "by local admin"
    assert await at.turn(courier, 3600.0) == []
    await at.client.resume_webhook(made.id)
    assert await at.turn(courier) == ["job.queued"]


@serving
async def test_of_two_that_could_send_one_does_and_another_goes_on_where_it_ended(at: Service) -> None:
    await at.client.create_webhook("ops", at.told.url)
    one, two = at.courier(), at.courier()
    await at.job("job-1")
    told = [await one.turn(), await two.turn()]
    await one.settled()
    await two.settled()
    assert told == [True, False] and len(at.told.messages) == 1
    at.told.gate.clear()
    at.told.came.clear()
    await at.job("job-2")
    await one.turn()
    await at.told.came.wait()
    await one._stop()  # heard, and not written down
    at.told.gate.set()
    assert await at.turn(two) == ["job.queued"], "once more rather than never"
    assert at.told.messages[1].headers["webhook-id"] == at.told.messages[2].headers["webhook-id"]
    assert await at.turn(one) == [] and await at.turn(two, 3600.0) == []


@serving
async def test_what_a_sender_that_lost_its_lease_did_is_not_written_down(at: Service) -> None:
    made = await at.client.create_webhook("ops", at.told.url)
    one, two = at.courier(), at.courier()
    at.told.gate.clear()
    await at.job("job-1")
    await one.turn()
    await at.told.came.wait()
    await one.store.release(one.holder)
    at.told.came.clear()
    await two.turn()
    await at.told.came.wait()
    at.told.gate.set()
    await one.settled()
    await two.settled()
    (delivery,) = await at.client.deliveries(made.id)
    assert delivery.status == "delivered" and len(delivery.attempts) == 1


@serving
async def test_a_receiver_that_does_not_answer_holds_up_no_other(at: Service) -> None:
    async with receiving() as slow:
        slow.gate.clear()
        stuck = await at.client.create_webhook("slow", slow.url)
        await at.client.create_webhook("ops", at.told.url, events=["job.cancelled"])
        courier = at.courier()
        for number in range(15):
            await at.job(f"job-{number}")
        await courier.turn()
        over = await at.job("job-over")
        at.now += 1.0
        await at.happens(replace(over, state=Cancelled(at=2.0)), "ended", "CANCELLED")
        for _ in range(3):
            await courier.turn()
        await at.told.came.wait()
        assert json.loads(at.told.messages[0].body)["type"] == "job.cancelled" and len(slow.messages) <= MAX_FLYING_EACH
        slow.gate.set()
        for _ in range(5):
            await at.turn(courier)
        assert {one.status for one in await at.client.deliveries(stuck.id)} == {"delivered"}


@serving
async def test_a_token_of_a_project_makes_and_sees_webhooks_of_that_project_only(at: Service) -> None:
    whole = await at.client.create_webhook("all", at.told.url)
    theirs = await at.client.create_webhook("theirs", at.told.url, projects=["mine", "foreign"])
    async with AsyncClient(at.url, token=await at.token(Role.ADMIN, projects=("mine",))) as limited:
        made = await limited.create_webhook("own", at.told.url)
        assert made.projects == ("mine",) and [one.id for one in await limited.webhooks()] == [made.id]
        for hook in (whole, theirs):
            for ask in (limited.webhook, limited.delete_webhook, limited.test_webhook, limited.deliveries):
                with pytest.raises(ApiError, match=f"there is no webhook {hook.id}") as refused:
                    await ask(hook.id)
                assert refused.value.status == 404
        with pytest.raises(ApiError, match="makes webhooks of mine"):
            await limited.create_webhook("own", at.told.url, projects=["foreign"])
        with pytest.raises(ApiError, match="the whole cluster"):
            await limited.create_webhook("own", at.told.url, events=["node.lost"])
    courier = at.courier()
    await at.job("job-1", project="foreign")
    await at.turn(courier)
    assert [len(await at.client.deliveries(one.id)) for one in (whole, theirs, made)] == [1, 1, 0]
    async with AsyncClient(at.url, token=await at.token(Role.OPERATOR)) as operator:
        with pytest.raises(ApiError, match="needs the role admin"):
            await operator.webhooks()


@serving
async def test_addresses_that_are_not_public_are_refused_when_a_webhook_is_made_and_when_it_is_told(at: Service) -> None:
    for url in ("https://10.0.0.1/", "https://user:word@hooks.example/", "https://[::ffff:169.254.169.254]/"):
        with pytest.raises(ApiError) as refused:
            await at.client.create_webhook("bad", url)
        assert refused.value.status == 422 and refused.value.errors[0]["field"] == "url"
        assert "word@" not in str(refused.value.problem)
    made = await at.client.create_webhook("ops", at.told.url)
    courier = at.courier()
    courier.sender = PinnedSender(Reach(http=True))  # as if its name led elsewhere by now
    await at.job("job-1")
    assert await at.turn(courier) == []
    (delivery,) = await at.client.deliveries(made.id)
    assert "leads to 127.0.0.1, which is no public address" in delivery.attempts[0].error and delivery.status == "pending"


@serving
async def test_nodes_that_are_lost_are_told(at: Service) -> None:
    await at.client.create_webhook("ops", at.told.url, events=["node.lost"])
    await at.client.create_webhook("nlp", at.told.url, projects=["nlp"])
    courier, node = at.courier(), Node(id=NodeId("n1"), kind="A100", num_devices=2)
    await at.store.commit(at.term, Commit(nodes=(node,)))
    assert await at.turn(courier) == []
    await at.store.commit(at.term, Commit(nodes=(replace(node, status=NodeStatus.LOST),)))
    assert await at.turn(courier) == ["node.lost"]
    assert await at.turn(at.courier()) == [] and await at.turn(courier) == []


@serving
async def test_deliveries_are_capped_and_neither_ended_jobs_nor_a_service_without_hooks_are_looked_at(
    at: Service,
) -> None:
    courier = at.courier()
    reads = at.store._clients.reads
    assert await courier.turn() is False and not await reads.keys(f"{keys.HOOKS}*"), "without a hook nothing is kept"
    made = await at.client.create_webhook("ops", at.told.url)
    for number in range(30):
        job = await at.job(f"job-{number:02}")
        if number % 2:
            await at.happens(replace(job, state=Succeeded(at=2.0)), "ended", "done")
    gone = await at.job("job-archived")
    await at.happens(replace(gone, state=Succeeded(at=1.0)), "ended", "done")
    await at.store.retire(at.term, 100.0, Retention(kept_s=98.5))
    for _ in range(20):
        await at.turn(courier)
    assert len(await at.client.deliveries(made.id)) == 20
    assert await reads.hlen(f"{keys.PREFIX}hooks:read") == 15 and await reads.zcard(keys.HOOKS_DUE) == 0
    await at.client.delete_webhook(made.id)
    await courier._stop()
    assert not await reads.keys(f"{keys.PREFIX}hook*")


def test_nothing_is_lost_while_redis_is_away(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path / "redis")
    redis.start()

    async def whole() -> None:
        async with service(tmp_path, redis) as at:
            made = await at.client.create_webhook("ops", at.told.url)
            courier = at.courier()
            at.told.answers.append(500)
            await at.job("job-1")
            await at.turn(courier)
            await at.job("job-2")
            await asyncio.to_thread(redis.stop)
            with pytest.raises(Unavailable):
                await courier.turn()
            await asyncio.to_thread(redis.start)
            for _ in range(2):
                await at.turn(courier, 60.0)
            found = await at.client.deliveries(made.id)
            assert [one.status for one in found] == ["delivered", "delivered"] and len(at.told.messages) == 3

    try:
        asyncio.run(whole())
    finally:
        redis.stop()


@serving
async def test_the_command_line_makes_tests_and_removes_webhooks(at: Service) -> None:
    async def everstep(*args: str) -> str:
        runner = CliRunner(env={"EVERSTEP_TOKEN": at.owner, "COLUMNS": "160"})
        result = await asyncio.to_thread(runner.invoke, command, ["--url", at.url, "webhook", *args])
        assert result.exit_code == 0, result.output
        return result.output

    assert "no webhooks" in await everstep("ls")
    made = json.loads(
        await everstep("create", "ops", at.told.url, "-e", "job.failed", "-e", "job.queued", "-l", "team=a", "--json")
    )
    assert "everstep webhook test" in await everstep("create", "other", at.told.url)
    listed = await everstep("ls")
    assert "job.failed, job.queued" in listed and "team=a" in listed and made["secret"] not in listed
    assert "on its way" in await everstep("test", made["id"])
    assert await at.turn(at.courier()) == ["ping"]
    log = await everstep("log", made["id"])
    assert "ping" in log and "delivered" in log and "204" in log
    (message,) = json.loads(await everstep("log", made["id"], "--json"))
    assert "again" in await everstep("redeliver", made["id"], message["id"])
    assert "paused" in await everstep("pause", made["id"]) and "paused: by local admin" in await everstep("ls")
    assert "active" in await everstep("resume", made["id"]) and "gone" in await everstep("rm", made["id"])
