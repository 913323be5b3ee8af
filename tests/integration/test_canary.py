"""A secret that a job names, and that its program prints, raises and passes on, is in its environment and nowhere else.

Redis, the API over a port, the supervisor, a host and its ranks are real; Ray alone is its in-memory twin.
"""

from __future__ import annotations

import asyncio
import contextlib
import tarfile
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path

import psutil
import pytest
import uvicorn

from api.app import create_app
from api.cli import bundle
from api.client import ApiError, AsyncClient, Client
from api.courier import Courier
from api.routes.hooks import Webhooks
from api.settings import ApiSettings
from api.tokens import digest, mint
from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.hook_secrets import HookSecretFolder
from orchestrator.adapters.hook_sender import PinnedSender
from orchestrator.adapters.local_hosts import LocalHosts
from orchestrator.adapters.plan_thread import ThreadForeseer, ThreadPlanner
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.adapters.redis_clients import RedisAddress
from orchestrator.adapters.redis_desk import RedisDesk
from orchestrator.adapters.redis_hooks import RedisHooks
from orchestrator.adapters.redis_keyring import RedisKeyring
from orchestrator.adapters.redis_store import RedisStore
from orchestrator.adapters.secret_folder import SecretFolder
from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import NodeId
from orchestrator.notify.addresses import Reach
from orchestrator.supervisor.acting import World
from orchestrator.supervisor.run import Supervisor
from tests.heard import receiving

pytestmark = pytest.mark.timeout(240)
LOOPBACK = Reach(http=True, networks=(ip_network("127.0.0.0/8"),))
CANARY = "c4n4ry-9f8e7d6c5b4a"
PROGRAM = """
import os, sys
from worker.programs import causal_lm

IMPORTED_BY = os.getpid()

class Tells:
    def describe(self, spec):
        print("described with", os.environ["HF_TOKEN"], file=sys.stderr)
        return causal_lm.PROGRAM.describe(spec)
    def initial(self, spec, line):
        return causal_lm.PROGRAM.initial(spec, line)
    def build(self, spec, first, last, tp, leaves):
        if os.getpid() == IMPORTED_BY:  # which ranks are forked from, once it has built one
            return causal_lm.PROGRAM.build(spec, first, last, tp, leaves)
        secret = os.environ["HF_TOKEN"]
        print("built with", secret)
        os.write(2, f"past every stream: {secret}\\n".encode())
        raise ValueError(f"the hub refused {secret}")

PROGRAM = Tells()
"""


@contextlib.asynccontextmanager
async def service(root: Path, address: RedisAddress, owner: str) -> AsyncIterator[str]:
    """The API's address, with a supervisor at work."""
    vault = SecretFolder(root / "secrets")
    store, desk, keyring = RedisStore(address), RedisDesk(address), RedisKeyring(address)
    cluster = LocalHosts((Node(id=NodeId("n0"), kind="A100", num_devices=2),))
    world = World(
        store=store,
        cluster=cluster,
        provider=cluster,
        prober=SubprocessProber(secrets=vault),
        planner=ThreadPlanner(),
        checkpoints=FolderCheckpoints(str(root)),
    )
    settings = ApiSettings(state_dir=root, idle_check_s=0.1, local_digest=digest(owner))
    hooks, hook_secrets = RedisHooks(address), HookSecretFolder(root / "webhook-secrets")
    webhooks = Webhooks(store=hooks, secrets=hook_secrets, reach=LOOPBACK)
    app = create_app(desk, settings, ThreadForeseer(SubprocessProber()), keyring, vault, webhooks)
    telling = asyncio.create_task(Courier(desk, hooks, hook_secrets, PinnedSender(LOOPBACK)).run())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
    supervising = asyncio.create_task(Supervisor(world=world, root=str(root), holder="one").serve())
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await supervising
        telling.cancel()
        await asyncio.wait({telling})
        await cluster.close()
        for one in (store, desk, keyring, hooks):
            await one.close()


def test_a_secret_is_in_its_jobs_environment_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tells_secrets.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=":")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    job = {
        "name": "canary",
        "program": "tells_secrets:PROGRAM",
        "data": {"files": [str(tmp_path / "text.txt")]},
        "model": {"layers": 2, "width": 32, "heads": 2, "ffn": 64},
        "train": {"steps": 5, "micro_batches": 4, "micro_batch_size": 1, "sequence": 16},
        "secrets": {"HF_TOKEN": "hf-token"},
    }
    root, owner = tmp_path / "state", mint()
    redis = EmbeddedRedis(root)
    address = redis.start()
    found: dict[str, str] = {}
    canaries = [CANARY]

    async def scenario() -> None:
        async with (
            receiving() as told,
            service(root, address, owner) as url,
            AsyncClient(url, token=owner) as client,
        ):
            made = await client.create_webhook("canary", told.url)
            canaries.extend((made.secret, made.secret.removeprefix("whsec_")))
            missing = await client.wait((await client.submit(job)).id, timeout_s=120)
            assert missing.status == "FAILED" and "everstep secret set hf-token --project default" in missing.reason
            SecretFolder(root / "secrets").put("default", "hf-token", CANARY)
            for wrong in ({"model": {"api_key": CANARY}}, {"labels": {"token": CANARY}}, {"password": CANARY}):
                with pytest.raises(ApiError) as refused:
                    await client.submit(job | wrong, key=CANARY)
                assert refused.value.status == 422
                found[f"answer to {list(wrong)}"] = str(refused.value.problem)
            submitted = await client.submit(job, key=CANARY)
            waiting = asyncio.create_task(client.wait(submitted.id, timeout_s=120))
            commands: set[str] = set()
            while not waiting.done():
                commands |= {" ".join(_command(one)) for one in psutil.Process().children(recursive=True)}
                await asyncio.sleep(0.05)
            over = await waiting
            assert over.status == "FAILED" and "the hub refused [redacted]" in over.reason
            found["arguments"] = "\n".join(commands)
            assert "worker.zygote" in found["arguments"], "it was looked at while it ran"
            for path in ("", "/events?since=0", "/logs", "/logs?offset=20", "/plans", "/faults", "/metrics"):
                found[path] = (await client._http.get(f"/api/v1/jobs/{over.id}{path}")).text
            while not any(b"the hub refused" in one.body for one in told.messages):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.05)
            found["told"] = "".join(str(one) for one in told.messages)
            assert "the hub refused [redacted]" in found["told"]
            mine = f"/api/v1/webhooks/{made.id}"
            for path in ("/api/v1/jobs", "/api/v1/audit", "/metrics", "/api/v1/queue", mine, f"{mine}/deliveries"):
                found[path] = (await client._http.get(path)).text
            assert "built with [redacted]" in found["/logs"] and f"stream: {'*' * len(CANARY)}" in found["/logs"]
            assert '"operation":"submit"' in found["/api/v1/audit"]

            def pack() -> None:
                with Client(url, token=owner) as other:
                    bundle.write(tmp_path / "bundle.tar.gz", other, other.job(over.id), 1000, "0")

            await asyncio.to_thread(pack)
            found["host's log"] = next((root / "jobs" / over.id / "logs").glob("*zygote.log")).read_text()
            reader = RedisDesk(address)
            for key in await reader._clients.reads.keys("*"):
                found[f"Redis {key!r}"] = repr(key) + repr(await reader._clients.reads.dump(key))
            await reader.close()

    try:
        asyncio.run(scenario())
    finally:
        redis.stop()
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        for one in archive.getmembers():
            file = archive.extractfile(one)
            found[f"bundle {one.name}"] = file.read().decode() if file else ""
    assert any(name.endswith(".log") for name in found if name.startswith("bundle"))
    found["Redis' file"] = "".join(file.read_bytes().decode("latin1") for file in (root / "redis").rglob("*.aof*"))
    assert len(found["Redis' file"]) > 1000
    found["what was said"] = "".join(capfd.readouterr())
    assert len(canaries) == 3
    assert [name for name, text in found.items() if any(canary in text for canary in canaries)] == []


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
