"""Planning in a process of its own: a large search takes nothing from the loop that watches over jobs.

    supervisor ── number, length, question ──> worker: plan_thread.ThreadPlanner ── number, length, answer ──> supervisor

Questions and answers are domain values as JSON. One worker answers for all jobs, several at a time, and knows nothing that
another would not find out again; it ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import sys

import structlog

from orchestrator.domain import codec
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.plan import Infeasible, Plan

from .plan_thread import ThreadPlanner

COMMAND = (sys.executable, "-m", __spec__.name if __spec__ is not None else __name__)
IGNORES_KINDS = "--ignores-kinds"
TRIES = 3
"""For a question over which the worker ends: it may be what ends it (memory), and somebody may just have killed it."""
_HEAD = struct.Struct("!QI")

log = structlog.get_logger()


class WorkerEnded(Exception):
    """Before it had answered."""


class PlanProcess:
    """ports.Planner. Its worker (command) is started by `start` or the first question, and anew where it has ended."""

    def __init__(self, *, ignores_kinds: bool = False, command: tuple[str, ...] = COMMAND) -> None:
        self._command = (*command, *([IGNORES_KINDS] if ignores_kinds else []))
        self._worker: _Worker | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._worker.process.pid if self._worker is not None else None

    @property
    def num_open(self) -> int:
        """Questions that its worker has been asked and has not answered."""
        return len(self._worker.open) if self._worker is not None else 0

    async def start(self) -> None:
        await self._living()

    async def choose(self, request: ChoosePlan) -> Plan | Infeasible:
        """Infeasible, for now, where the worker ends over it again and again."""
        question = await asyncio.to_thread(codec.dumps, request)
        for _ in range(TRIES):
            worker = await self._living()
            try:
                answer = await worker.ask(question)
            except WorkerEnded as error:
                log.warning("planner_ended", job=request.job, why=str(error))
            else:
                return await asyncio.to_thread(_read, answer)
        said = f"the planner's process {worker.end} over this question {TRIES} times"
        return Infeasible(reason=f"{said}; see the supervisor's log, and whether the machine lacks memory")

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()

    async def _living(self) -> _Worker:
        async with self._starting:
            if self._worker is None or self._worker.has_ended:
                process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
                )
                self._worker = _Worker(process)
            return self._worker


class _Worker:
    """One process, and the questions that it has not answered yet."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.has_ended = False
        self.end = "has not ended"
        self._numbers = itertools.count()
        self.open: dict[int, asyncio.Future[bytes]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, question: bytes) -> bytes:
        """Raises WorkerEnded."""
        assert self.process.stdin is not None
        if self.has_ended:
            raise WorkerEnded(self.end)
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.open[number] = answer
        # What cannot be written any more is found by who listens.
        self.process.stdin.write(_HEAD.pack(number, len(question)) + question)
        try:
            return await answer
        finally:
            self.open.pop(number, None)

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self._listening

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while (found := await _frame(self.process.stdout)) is not None:
            number, answer = found
            if number in self.open and not self.open[number].done():
                self.open[number].set_result(answer)
        code = await self.process.wait()
        self.has_ended = True
        self.end = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        for waiting in self.open.values():
            if not waiting.done():
                waiting.set_exception(WorkerEnded(self.end))


def _read(answer: bytes) -> Plan | Infeasible:
    return codec.loads(Plan | Infeasible, answer)  # type: ignore[arg-type]


async def _frame(stream: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """None at its end."""
    try:
        number, length = _HEAD.unpack(await stream.readexactly(_HEAD.size))
        return number, await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# --- the worker ----------------------------------------------------------------------------------------------------------


async def _serve(planner: ThreadPlanner) -> None:
    loop, questions = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    answering: set[asyncio.Task[None]] = set()

    async def answer(number: int, question: bytes) -> None:
        found = codec.dumps(await planner.choose(await asyncio.to_thread(codec.loads, ChoosePlan, question)))
        frame = _HEAD.pack(number, len(found)) + found
        sys.stdout.buffer.write(frame)
        sys.stdout.buffer.flush()

    while (one := await _frame(questions)) is not None:
        task = asyncio.create_task(answer(*one))
        answering.add(task)
        task.add_done_callback(answering.discard)


async def main() -> None:
    await _serve(ThreadPlanner(ignores_kinds=IGNORES_KINDS in sys.argv))
    os._exit(0)  # a search that is under way is of use to nobody


if __name__ == "__main__":
    asyncio.run(main())
