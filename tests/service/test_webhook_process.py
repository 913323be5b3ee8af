"""The API's own processes tell webhooks, and one goes on where another was killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api.client import AsyncClient
from api.client.webhooks import received
from deploy.owner import own_token
from orchestrator.adapters.embedded_redis import EmbeddedRedis, free_port
from tests.heard import receiving

pytestmark = pytest.mark.timeout(120)
CONFIG = "webhooks: {http: true, networks: [127.0.0.0/8]}\n"
FILE = {
    "name": "byte-gpt",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}"]},
    "train": {"steps": 3, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64},
}


def start(state_dir: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deploy.api_server", "--state-dir", str(state_dir), "--port", str(port)]
    return subprocess.Popen(command, stderr=(state_dir / "log").open("ab"))


@asynccontextmanager
async def api(state_dir: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], AsyncClient]]:
    port = free_port()
    process = start(state_dir, port)
    try:
        async with AsyncClient(f"http://127.0.0.1:{port}", token=own_token(state_dir), retry_s=60.0) as client:
            await client.server_version()
            yield process, client
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)


def test_a_message_outlives_the_process_that_was_sending_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    redis = EmbeddedRedis(tmp_path)
    redis.start()

    async def whole() -> None:
        async with receiving() as told:
            told.gate.clear()
            async with api(tmp_path) as (first, client):
                made = await client.create_webhook("ops", told.url)
                job = await client.submit(FILE)
                await told.came.wait()
                first.send_signal(signal.SIGKILL)
            async with api(tmp_path) as (_, client):
                told.gate.set()
                while (await client.deliveries(made.id))[0].status != "delivered":  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.1)
                (delivery,) = await client.deliveries(made.id)
            one, again = told.messages
            assert one.headers["webhook-id"] == again.headers["webhook-id"] == delivery.id and one.body == again.body
            event = received(again.headers, again.body, made.secret)
            assert event.type == "job.submitted" and event.data["job"]["id"] == job.id

    try:
        asyncio.run(whole())
    finally:
        redis.stop()
