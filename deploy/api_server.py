"""The API's process: the desk on Redis behind the app. Ends within seconds, open event streams or not."""

from __future__ import annotations

import argparse
import asyncio
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import uvicorn

from api.app import create_app
from api.settings import LOOPBACK, ApiSettings
from api.tokens import digest
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.plan_process import ThreadForeseer
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.adapters.redis_desk import RedisDesk
from orchestrator.adapters.redis_keyring import RedisKeyring
from orchestrator.domain.errors import Refused

from .owner import own_token, require_auth

GRACE_S = 2
"""Between the signal to stop and cutting the streams that are still open: readers come back with their last id."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chaos", action="store_true", help="allow POST /api/v1/faults")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens; others than loopback need auth")
    parser.add_argument("--no-auth", action="store_true", help="ask nobody who they are; on loopback only")
    asked = parser.parse_args()
    try:
        require_auth(asked.host, not asked.no_auth)
    except Refused as error:
        raise SystemExit(error.message) from error
    asyncio.run(serve(asked.state_dir.resolve(), asked.host, asked.port, asked.chaos, not asked.no_auth))


async def serve(state_dir: Path, host: str, port: int, chaos: bool, has_auth: bool = True) -> None:
    address = EmbeddedRedis(state_dir).address
    desk = RedisDesk(address, timeout_s=0.9)
    keyring = RedisKeyring(address, timeout_s=0.9)
    settings = ApiSettings(
        state_dir=state_dir,
        chaos=chaos,
        version=_version(),
        local_digest=digest(own_token(state_dir)),
        allowed_hosts=tuple(dict.fromkeys((*LOOPBACK, host))),
    )
    app = create_app(desk, settings, ThreadForeseer(SubprocessProber()), keyring if has_auth else None)
    config = uvicorn.Config(
        app,
        host=host,
        server_header=False,
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
        await keyring.close()


def _version() -> str:
    try:
        return version("everstep")
    except PackageNotFoundError:
        return "0"


if __name__ == "__main__":
    main()
