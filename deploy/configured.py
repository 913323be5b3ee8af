"""Flags of the service's processes, and the configuration they, the environment and a file add up to.

What is an error in a configuration is said in one sentence, with exit status 2: no process starts on half of one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from api.config import Config
from api.config_sources import Resolved, leaves, resolve, variable_of
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.ray_environment import RayEnvironment, for_state_dir
from orchestrator.adapters.redis_clients import RedisAddress
from orchestrator.domain.errors import Refused

USAGE = 2
_SECRET = frozenset(name for name, kind in leaves() if kind in (SecretStr, SecretStr | None))


def parser(description: str | None, flags: Sequence[str] = (), prog: str | None = None) -> argparse.ArgumentParser:
    """flags: settings that have a flag of their own, by dotted name: `api.port` is --port; any other goes by --set."""
    made = argparse.ArgumentParser(prog=prog, description=description)
    made.add_argument("--config", type=Path, metavar="FILE", help="YAML, TOML or JSON; see `everstep config schema`")
    made.add_argument("--state-dir", dest="state_dir", metavar="DIR")
    for name in flags:
        last = name.rpartition(".")[2]
        if name == "api.chaos":
            made.add_argument("--chaos", dest=name, action="store_const", const=True, help="users may cause faults")
        else:
            made.add_argument(f"--{last.replace('_', '-')}", dest=name, metavar=last.upper(), help=f"the setting {name}")
    made.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, such as log.level=debug"
    )
    return made


def resolved(asked: argparse.Namespace) -> Resolved:
    """Ends the process where the configuration is refused."""
    flags: dict[str, Any] = {name: value for name, value in vars(asked).items() if "." in name or name == "state_dir"}
    try:
        return resolve({**flags, **assignments(asked.set)}, os.environ, asked.config)
    except Refused as error:
        print(f"{sys.argv[0]}: {error.message}", file=sys.stderr)
        raise SystemExit(USAGE) from error


def passed_on(asked: argparse.Namespace) -> tuple[str, ...]:
    """What another process of the service is started with, so that it resolves to the same configuration."""
    file = ("--config", str(asked.config.resolve())) if asked.config is not None else ()
    return (*file, *(word for one in asked.set for word in ("--set", one)))


def assignments(said: Sequence[str]) -> dict[str, str]:
    """Of NAME=VALUE. Raises Refused, also for a password: a process's arguments are seen by everybody, and passed on."""
    found = {}
    for one in said:
        name, equals, value = one.partition("=")
        if not equals:
            raise Refused(f"--set {one!r} must be NAME=VALUE")
        if name in _SECRET:
            raise Refused(f"{name} would be seen among the arguments; give {name}_file, or {variable_of(name)}")
        found[name] = value
    return found


def redis_address(config: Config) -> RedisAddress:
    """Of the Redis run apart, else of the embedded one. Raises Refused; Unavailable before that was ever started."""
    redis = config.redis
    if not redis.host:
        return EmbeddedRedis(config.root).address
    password = redis.password.get_secret_value() if redis.password else None
    if redis.password_file is not None:
        password = _first_line(redis.password_file)
    return RedisAddress(host=redis.host, port=redis.port, password=password)


def ray_environment(config: Config) -> RayEnvironment:
    found = for_state_dir(config.root)
    token = config.ray.token_file
    return found if token is None else replace(found, token_file=token.expanduser().resolve())


def tell_jobs(config: Config) -> None:
    """Whatever this process starts finds the section `jobs` in its environment: hosts read no configuration."""
    os.environ.update({variable_of(f"jobs.{name}"): str(value) for name, value in config.jobs.model_dump().items()})


def _first_line(path: Path) -> str:
    try:
        return path.expanduser().read_text("utf-8").partition("\n")[0].strip()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}; it should hold the password of Redis") from error
