"""A host's self-tests: each in a process of its own that has nothing to do with any rank, ended when it takes too long.

It owns those processes. It refuses to know why a device is doubted and what its answer leads to.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from orchestrator.domain.host_events import SelfTested
from orchestrator.domain.ids import Device

from .child import of_one_thread

TIMEOUT_S = 60.0
"""It takes about two seconds, most of them to import torch; a busy machine takes many times that."""


class Examination:
    """Used on one asyncio loop. tell: takes the verdicts."""

    def __init__(self, tell: Callable[[SelfTested], None], timeout_s: float = TIMEOUT_S) -> None:
        self._tell = tell
        self._timeout_s = timeout_s
        self._tasks: dict[Device, asyncio.Task[None]] = {}

    def begin(self, device: Device) -> None:
        """Answered by `tell`; a device that is being tested already is not tested twice at once."""
        if device not in self._tasks:
            task = self._tasks[device] = asyncio.ensure_future(self._examine(device))
            task.add_done_callback(lambda _: self._tasks.pop(device, None))

    async def close(self) -> None:
        """End those under way without an answer."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _examine(self, device: Device) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "worker.selftest", str(device.index)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=of_one_thread(os.environ),
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                said = await process.stdout.read()
                passed, message = _read(said, await process.wait())
        except TimeoutError:
            passed, message = False, f"the self-test did not end within {self._timeout_s:g} s"
        finally:
            # Also when this task is cancelled.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        self._tell(SelfTested(device=device, passed=passed, message=message))


def _read(said: bytes, exit_code: int) -> tuple[bool, str]:
    try:
        answer = json.loads(said)
        return bool(answer["passed"]), str(answer["message"])
    except (ValueError, KeyError, TypeError):
        return False, f"the self-test ended with exit code {exit_code} and said nothing"
