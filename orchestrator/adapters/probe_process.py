"""Describing a program in a process of its own, which may do whatever the user's code does: crash, hang, print."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from orchestrator.domain import codec
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.errors import EverstepError, FieldProblem, Refused
from orchestrator.domain.profile import Profile
from orchestrator.domain.secrecy import Veil
from orchestrator.domain.spec import JobSpec
from orchestrator.ports import Probed
from worker.lodging import Lodging, Policy

from .ray_environment import CLUSTER_MARK
from .secret_folder import SecretFolder
from .starting_point import begun_from

TIMEOUT_S = 300.0
"""Importing a large program from a cold disk takes minutes; beyond this it hangs."""
_LAST_WORDS = 5
"""Lines of a failed probe's output that are passed on."""


class SubprocessProber:
    """secrets: where the values are that jobs name; without it a program is described without them."""

    def __init__(self, timeout_s: float = TIMEOUT_S, secrets: SecretFolder | None = None) -> None:
        self._timeout_s = timeout_s
        self._secrets = secrets

    async def probe(self, spec: JobSpec) -> Probed:
        """Raises Refused, also where the process crashed or did not answer in time."""
        secrets = self._secrets.environment(spec) if self._secrets is not None else {}
        try:
            return await self._ask(spec, environment=secrets)
        except Refused as error:
            veil = Veil(secrets.values())
            raise Refused(veil.over_text(error.message), veil.over(error.problems)) from None

    async def describe(self, spec: JobSpec) -> Profile:
        """The program alone: its text and its checkpoints may be elsewhere. Raises Refused."""
        return (await self._ask(spec, "--program")).profile

    async def _ask(self, spec: JobSpec, *arguments: str, environment: Mapping[str, str] | None = None) -> Probed:
        try:
            lodging = await asyncio.to_thread(_lodging, spec)
        except (EverstepError, OSError) as error:
            raise Refused(f"the program cannot be described on {os.uname().nodename}: {error}") from error
        try:
            cell = lodging.cell
            given = {**(environment or {}), **cell.environment}
            return await self._ask_in(spec, given, (*arguments, "--cell", codec.dumps(cell).decode()))
        finally:
            await asyncio.to_thread(lodging.leave)

    async def _ask_in(self, spec: JobSpec, environment: Mapping[str, str], arguments: Sequence[str]) -> Probed:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "worker.probe", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**_without_secrets(), **environment},
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                said, complained = await process.communicate(codec.dumps(spec))
        except TimeoutError:
            limit = f"{self._timeout_s:g} s"
            raise Refused(
                f"the program was not described within {limit}; see what its import and describe wait for"
            ) from None
        finally:
            # Also whatever it has started, and also when this task is cancelled.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return _read(said, complained, process.returncode)


def _read(said: bytes, complained: bytes, exit_code: int | None) -> Probed:
    try:
        answer: dict[str, Any] = json.loads(said)
        if "profile" in answer:
            return Probed(
                profile=codec.decode(Profile, answer["profile"]), start=codec.decode(CheckpointRef | None, answer["start"])
            )
        problems = codec.decode(tuple[FieldProblem, ...], answer["refused"]["problems"])
        raise Refused(answer["refused"]["message"], problems)
    except (ValueError, KeyError, TypeError):
        words = " | ".join(complained.decode(errors="replace").strip().splitlines()[-_LAST_WORDS:]) or "it said nothing"
        raise Refused(f"the program ended with exit code {exit_code} while it was described: {words}") from None


def _lodging(spec: JobSpec) -> Lodging:
    # Two programs that are described at once are two users.
    return Lodging(Policy.of(os.environ), "probe", tuple(map(str, begun_from(spec))), key=secrets.token_hex(8))


def _without_secrets() -> dict[str, str]:
    """User code runs here: it gets no way to Ray. The cluster's mark stays, so that it goes when the cluster does."""
    hidden = ("RAY_", "EVERSTEP_")
    return {name: value for name, value in os.environ.items() if name == CLUSTER_MARK or not name.startswith(hidden)}
