"""The API's process: the desk on Redis behind the app, on loopback. Ends within seconds, open event streams or not."""

from __future__ import annotations

import argparse
import asyncio
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import uvicorn

from api.app import create_app
from api.settings import ApiSettings
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.plan_process import ThreadForeseer
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.adapters.redis_desk import RedisDesk

GRACE_S = 2
"""Between the signal to stop and cutting the streams that are still open: readers come back with their last id."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chaos", action="store_true", help="allow POST /api/v1/faults")
    asked = parser.parse_args()
    asyncio.run(serve(asked.state_dir.resolve(), asked.port, asked.chaos))


async def serve(state_dir: Path, port: int, chaos: bool) -> None:
    desk = RedisDesk(EmbeddedRedis(state_dir).address, timeout_s=0.9)
    settings = ApiSettings(state_dir=state_dir, chaos=chaos, version=_version())
    app = create_app(desk, settings, ThreadForeseer(SubprocessProber()))
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        lifespan="off",
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    try:
        await uvicorn.Server(config).serve()
    finally:
        await desk.close()


def _version() -> str:
    try:
        return version("everstep")
    except PackageNotFoundError:
        return "0"


if __name__ == "__main__":
    main()
