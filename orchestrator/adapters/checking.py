"""Checking a node from outside: worker/nodecheck.py is run there, and at its peer's, in processes of their own.

It owns those processes while they last. Where they run, and in which environment, is their provider's to say.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from orchestrator.domain import codec
from orchestrator.domain.admission import Checked
from orchestrator.domain.errors import Unavailable
from worker.child import of_one_thread
from worker.nodecheck import CheckOrder, Meeting

MODULE = "worker.nodecheck"
CHECK_S = 40.0
"""It takes about a second; an accelerator's driver takes a few, and a busy machine many times that."""
MEET_S = 10.0
"""For a peer to begin to listen."""


class PeerUnavailable(Unavailable):
    """The other node of a pair; nothing is known about the one that is checked."""


async def run_check(order: CheckOrder, prefix: Sequence[str], env: Mapping[str, str]) -> Checked:
    """prefix: words before the command, where it is to run elsewhere. Raises Unavailable where it says nothing in time."""
    async with _process((), prefix, env) as process:
        try:
            async with asyncio.timeout(CHECK_S):
                said, _ = await process.communicate(codec.dumps(order))
            return codec.loads(Checked, said)
        except TimeoutError as error:
            raise Unavailable(
                f"a node's check did not end within {CHECK_S:g} s; see what keeps that machine busy"
            ) from error
        except ValueError as error:
            raise Unavailable(f"a node's check ended with exit code {process.returncode} and said nothing") from error


@asynccontextmanager
async def peer(name: str, address: str, prefix: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Meeting]:
    """A peer that waits for one meeting for as long as this lasts. Raises PeerUnavailable."""
    async with _process(("--meet", address), prefix, env) as process:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(MEET_S):
                found = codec.loads(Meeting, await process.stdout.readline())
        except (TimeoutError, ValueError) as error:
            raise PeerUnavailable(f"{name} could not be had for it") from error
        yield replace(found, peer=name)


@asynccontextmanager
async def _process(
    words: Sequence[str], prefix: Sequence[str], env: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Its whole session is ended with this."""
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", MODULE, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=of_one_thread(env),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
