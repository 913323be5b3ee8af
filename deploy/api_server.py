"""The API's process: the desk on Redis behind the app. Ends within seconds, open event streams or not.

Several may run on one Redis. Configured by flags, the environment and a file: `everstep config show`.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import uvicorn
import uvloop
from fastapi import FastAPI

from api.app import create_app
from api.config import Config
from api.courier import Courier
from api.routes.hooks import Webhooks
from api.settings import ApiSettings
from api.tokens import digest
from api.version import release
from orchestrator.adapters.hook_secrets import FOLDER as HOOK_SECRETS
from orchestrator.adapters.hook_secrets import HookSecretFolder
from orchestrator.adapters.hook_sender import PinnedSender
from orchestrator.adapters.plan_thread import ThreadForeseer
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.adapters.redis_desk import RedisDesk
from orchestrator.adapters.redis_hooks import RedisHooks
from orchestrator.adapters.redis_keyring import RedisKeyring
from orchestrator.adapters.secret_folder import FOLDER, SecretFolder
from orchestrator.domain.errors import Conflict, Refused

from . import configured, garbage, logs
from .owner import own_token, require_auth

FLAGS = ("api.host", "api.port", "api.chaos")
PROXIES = "FORWARDED_ALLOW_IPS"
"""uvicorn's variable: addresses of reverse proxies that are believed whom they speak for. Without it nobody is."""


def main() -> None:
    config = configured.resolved(configured.parser(__doc__, FLAGS, "everstep api").parse_args()).config
    logs.configure(config.log, "api")
    configured.tell_jobs(config)
    try:
        require_auth(config.api.host, config.api.auth == "required")
        own_token(config.root)
    except Refused as error:
        raise SystemExit(error.message) from error
    except Conflict as error:
        raise SystemExit(str(error)) from error
    # Half the processor time of a list or a submission that asyncio and h11 take.
    uvloop.run(serve(config))


async def serve(config: Config) -> None:
    address = configured.redis_address(config)
    desk = RedisDesk(address, timeout_s=0.9)
    keyring = RedisKeyring(address, timeout_s=0.9)
    hooks, hook_secrets = RedisHooks(address, timeout_s=0.9), HookSecretFolder(config.root / HOOK_SECRETS)
    app = create_app(
        desk,
        _settings(config),
        ThreadForeseer(SubprocessProber()),
        keyring if config.api.auth == "required" else None,
        SecretFolder(config.root / FOLDER),
        Webhooks(store=hooks, secrets=hook_secrets, reach=config.webhook_reach) if config.webhooks.enabled else None,
    )
    sender = PinnedSender(config.webhook_reach, timeout_s=config.webhooks.timeout_s)
    courier = Courier(desk, hooks, hook_secrets, sender, config.webhook_patience, told=app.state.metrics.told)
    garbage.settle()
    telling = asyncio.create_task(courier.run()) if config.webhooks.enabled else None
    try:
        await uvicorn.Server(server_config(app, config)).serve()
    finally:
        if telling is not None:
            telling.cancel()
            await asyncio.wait({telling})
        for one in (desk, keyring, hooks):
            await one.close()


def server_config(app: FastAPI, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        host=config.api.host,
        port=config.api.port,
        server_header=False,
        lifespan="off",
        log_config=None,
        log_level=config.log.level,
        access_log=False,
        timeout_graceful_shutdown=config.api.grace_s,
        # uvicorn believes X-Forwarded-For of anybody on this machine by default: the audit log would say what they like.
        proxy_headers=PROXIES in os.environ,
    )


def _settings(config: Config) -> ApiSettings:
    found = config.api_settings(release())
    hosts = tuple(dict.fromkeys((*found.allowed_hosts, config.api.host)))
    return replace(found, allowed_hosts=hosts, local_digest=digest(own_token(config.root)))


if __name__ == "__main__":
    main()
