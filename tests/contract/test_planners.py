"""Planning beside an event loop and in a process of its own: the same answers, and a process that may die at any time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from orchestrator.adapters.plan_process import TRIES, PlanProcess
from orchestrator.adapters.plan_thread import ThreadPlanner
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.planner.choose import choose
from tests.builders import a_profile, a_spec

ORPHAN = """
import asyncio, os, signal
from orchestrator.adapters.plan_process import PlanProcess

async def main():
    planner = PlanProcess()
    await planner.start()
    print(planner.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def asked(*kinds: str, job: str = "job") -> ChoosePlan:
    devices = tuple((Device(NodeId(f"n{index // 2}"), index % 2), kind) for index, kind in enumerate(kinds))
    return ChoosePlan(job=JobId(job), generation=Generation(1), spec=a_spec(), profile=a_profile(), devices=devices)


def with_planner(use: Callable[[PlanProcess], Awaitable[None]], planner: Callable[[], PlanProcess] = PlanProcess) -> None:
    async def run() -> None:
        one = planner()
        try:
            await use(one)
        finally:
            await one.close()

    asyncio.run(run())


def test_a_thread_and_a_process_answer_as_the_function_does() -> None:
    questions = [asked("A100", "A100", "A100", "A100"), asked("A100", "A100", "H100", "H100"), asked()]

    async def use(planner: PlanProcess) -> None:
        found = await asyncio.gather(*(planner.choose(one) for one in questions))
        assert list(found) == [choose(one) for one in questions] and isinstance(found[0], Plan)
        assert [await ThreadPlanner().choose(one) for one in questions] == list(found)

    with_planner(use)


def test_one_that_takes_all_devices_for_alike_says_so_to_its_process() -> None:
    question = asked("A100", "A100", "H100", "H100")

    async def use(planner: PlanProcess) -> None:
        assert await planner.choose(question) == await ThreadPlanner(ignores_kinds=True).choose(question)

    with_planner(use, lambda: PlanProcess(ignores_kinds=True))


def test_a_worker_that_is_killed_before_it_answers_is_replaced_and_asked_again() -> None:
    async def use(planner: PlanProcess) -> None:
        await planner.start()
        first = planner.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # it hears nothing of this before it dies
        answer = asyncio.create_task(planner.choose(asked("A100", "A100", "A100", "A100")))
        while psutil.Process(first).status() != psutil.STATUS_STOPPED or not planner.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        assert isinstance(await answer, Plan) and planner.pid != first

    with_planner(use)


def test_a_question_over_which_it_always_ends_is_answered_in_words() -> None:
    async def use(planner: PlanProcess) -> None:
        found = await planner.choose(asked("A100"))
        assert isinstance(found, Infeasible) and not found.forever
        assert f"ended with exit code 3 over this question {TRIES} times" in found.reason

    with_planner(use, lambda: PlanProcess(command=(sys.executable, "-c", "import sys; sys.stdin.read(1); sys.exit(3)")))


def test_it_ends_with_whoever_asks(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == -signal.SIGKILL
    pid = int(said.stdout)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)  # the test's own limit ends this
