"""The API's process: the desk on Redis behind the app. Ends within seconds, open event streams or not.

Several may run on one Redis. Configured by flags, the environment and a file: `everstep config show`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import uvicorn
import uvloop

from api.app import create_app
from api.config import Config, is_loopback
from orchestrator.adapters.plan_process import ThreadForeseer
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.adapters.redis_desk import RedisDesk

from . import configured, logs

FLAGS = ("api.host", "api.port", "api.chaos")


def main() -> None:
    config = configured.resolved(configured.parser(__doc__, FLAGS, "everstep api").parse_args()).config
    logs.configure(config.log, "api")
    if not is_loopback(config.api.host):
        raise SystemExit(
            f"api.host is {config.api.host}, where others can reach it, and nobody is asked who they are; use 127.0.0.1"
        )
    # Half the processor time of a list or a submission that asyncio and h11 take.
    uvloop.run(serve(config))


async def serve(config: Config) -> None:
    desk = RedisDesk(configured.redis_address(config), timeout_s=0.9)
    app = create_app(desk, config.api_settings(_version()), ThreadForeseer(SubprocessProber()))
    served = uvicorn.Config(
        app,
        http="httptools",
        host=config.api.host,
        port=config.api.port,
        lifespan="off",
        log_config=None,
        log_level=config.log.level,
        access_log=False,
        timeout_graceful_shutdown=config.api.grace_s,
    )
    try:
        await uvicorn.Server(served).serve()
    finally:
        await desk.close()


def _version() -> str:
    try:
        return version("everstep")
    except PackageNotFoundError:
        return "0"


if __name__ == "__main__":
    main()
