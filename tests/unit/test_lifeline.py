"""A rank's end is known when it begins, however large its memory, and not before."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from worker.lifeline import Lifeline
from worker.page.layout import create_page

HOLDS = """
import sys, time
from worker.lifeline import Lifeline
line = Lifeline(int(sys.argv[1]))
line.hold()
memory = bytearray(b"x") * int(sys.argv[2])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def page() -> Iterator[int]:
    fd = create_page()
    Lifeline(fd).make()
    yield fd
    os.close(fd)


def holder(page: int, size: int = 1) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOLDS, str(page), str(size)]
    process = subprocess.Popen(command, pass_fds=[page], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def test_an_end_is_told_once_it_begins_and_before_the_process_is_gone(page: int) -> None:
    process = holder(page, 400 << 20)

    async def told() -> tuple[float, float]:
        ended = asyncio.Event()
        Lifeline(page).watch(ended.set)
        await asyncio.sleep(0.1)
        assert not ended.is_set()
        began = time.monotonic()
        process.kill()
        async with asyncio.timeout(30):
            await ended.wait()
        seen = time.monotonic() - began
        await asyncio.to_thread(process.wait)
        return seen, time.monotonic() - began

    seen, gone = asyncio.run(told())
    assert seen < gone
    print(f"\nits end is known after {seen * 1000:.1f} ms, it is gone after {gone * 1000:.1f} ms")


def test_who_never_held_it_is_never_told_to_have_ended(page: int) -> None:
    async def told() -> bool:
        ended = asyncio.Event()
        Lifeline(page).watch(ended.set)
        await asyncio.sleep(0.1)
        return ended.is_set()

    assert not asyncio.run(told())


def test_a_watcher_outlives_its_loop(page: int) -> None:
    process = holder(page)

    async def watch() -> None:
        Lifeline(page).watch(lambda: None)

    asyncio.run(watch())
    process.kill()
    process.wait()
