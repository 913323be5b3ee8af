"""The API on a real Redis (every write synced before it is answered), for as long as a benchmark lasts.

No job trains here: records are written as a supervisor would write them, and commands are taken up by one that does nothing
else. It owns the processes it starts, and ends them.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.owner import own_token
from orchestrator.adapters.embedded_redis import EmbeddedRedis, free_port
from orchestrator.adapters.processes import ProcessId, wait_for_end
from orchestrator.adapters.redis_store import RedisStore
from orchestrator.domain.cluster import Node
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.events import HistoryEntry, StepRecord
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import DataSpec, JobSpec, ParallelSpec, TrainSpec
from orchestrator.domain.state import JobState, Queued, Running, Succeeded
from orchestrator.domain.status import status_of
from orchestrator.ports import Commit

from .wire import Connection

LEASE_S = 3600.0
BATCH = 200
STOP_S = 30.0


@dataclass
class Service:
    state_dir: Path
    port: int = field(default_factory=free_port)
    api: subprocess.Popen[bytes] | None = None

    @property
    def redis(self) -> EmbeddedRedis:
        return EmbeddedRedis(self.state_dir)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {own_token(self.state_dir)}"}

    @property
    def api_mb(self) -> float:
        """Its memory."""
        assert self.api is not None
        pages = int(Path(f"/proc/{self.api.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    def connection(self, timeout_s: float = 10.0, token: str | None = None) -> Connection:
        """token: another one than the owner's."""
        return Connection(self.port, {"Authorization": f"Bearer {token}"} if token else self.headers, timeout_s)

    def start_api(self, *settings: str) -> None:
        """settings: NAME=VALUE, as with --set."""
        command = [sys.executable, "-m", "deploy.api_server", "--state-dir", str(self.state_dir), "--port", str(self.port)]
        self.state_dir.mkdir(parents=True, exist_ok=True)
        with (self.state_dir / "bench-api.log").open("ab") as log:
            set_ = [word for one in ("log.level=warning", *settings) for word in ("--set", one)]
            self.api = subprocess.Popen([*command, *set_], stdout=log, stderr=log)

    async def ready(self, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while True:
            connection = self.connection(2.0)
            with suppress(OSError):
                if (await connection.request("GET", "/healthz")).status == 200:
                    connection.close()
                    return
            connection.close()
            if time.monotonic() > deadline:
                raise EverstepError(f"the API does not answer; see {self.state_dir / 'bench-api.log'}")
            await asyncio.sleep(0.05)

    def stop_api(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Seconds it took to end."""
        assert self.api is not None
        began = time.monotonic()
        self.api.send_signal(number)
        try:
            self.api.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.api.kill()
            self.api.wait()
        self.api = None
        return time.monotonic() - began

    def kill_redis(self) -> None:
        """As a crash would, and started again on what it had synced."""
        process: ProcessId | None = self.redis.process
        assert process is not None
        process.send(signal.SIGKILL)
        wait_for_end([process], STOP_S)
        self.redis.start()

    def stop(self) -> None:
        if self.api is not None:
            self.stop_api()
        self.redis.stop()


@contextmanager
def a_service() -> Iterator[Service]:
    """Redis runs; the API is for the caller to start."""
    with TemporaryDirectory(prefix="everstep-bench-", ignore_cleanup_errors=True) as folder:
        service = Service(Path(folder))
        service.redis.start()
        try:
            yield service
        finally:
            service.stop()


class Scribe:
    """Writes what a supervisor would."""

    def __init__(self, store: RedisStore, term: Term) -> None:
        self._store = store
        self._term = term

    async def fill(self, count: int, state: JobState, prefix: str) -> list[JobId]:
        """So many jobs in this state, each with the history of one."""
        ids = [JobId(f"job-{prefix}-{number:06d}") for number in range(count)]
        for start in range(0, count, BATCH):
            records = {id: a_record(id, state) for id in ids[start : start + BATCH]}
            entries = tuple(entry(record, "submitted") for record in records.values())
            await self._store.commit(self._term, Commit(jobs=records, history=entries))
        return ids

    async def nodes(self, nodes: tuple[Node, ...]) -> None:
        await self._store.commit(self._term, Commit(nodes=nodes))

    async def step(self, record: JobRecord) -> JobRecord:
        """The job's next step is committed now."""
        answer = Answer(step=Step(record.committed + 1), norm=1.0, losses=(2.5, 2.4))
        taken = StepRecord(
            job=record.id, generation=record.generation, at=time.time(), answer=answer, tokens=1024, seconds=0.2
        )
        known = replace(record, committed=answer.step, last_answer=answer)
        await self._store.commit(self._term, Commit(jobs={record.id: known}, steps=(taken,)))
        return known

    async def finish(self, record: JobRecord) -> None:
        done = replace(record, state=Succeeded(at=time.time()))
        await self._store.commit(self._term, Commit(jobs={record.id: done}, history=(entry(done, "succeeded"),)))

    async def take_up(self) -> None:
        """Commands, for ever, and do nothing else about them: they are bounded, and somebody has to."""
        cursor = (await self._store.load()).cursor
        while True:
            try:
                if commands := await self._store.commands(cursor, 1.0):
                    cursor = commands[-1][0]
                    await self._store.commit(self._term, Commit(cursor=cursor))
            except EverstepError:
                await asyncio.sleep(0.1)  # Redis is being started again


@asynccontextmanager
async def a_scribe(service: Service) -> AsyncIterator[Scribe]:
    store = RedisStore(service.redis.address, timeout_s=10.0)
    term = await store.acquire("benchmark", LEASE_S)
    assert term is not None
    try:
        yield Scribe(store, term)
    finally:
        with suppress(EverstepError):
            await store.release("benchmark", term)
        await store.close()


def a_spec(name: str = "bench", devices: int = 0) -> JobSpec:
    """devices: it wants at least so many."""
    train = TrainSpec(steps=1_000_000, micro_batches=4, micro_batch_size=2, sequence=64)
    parallel = ParallelSpec(min_devices=devices) if devices else ParallelSpec()
    return JobSpec(
        name=name,
        program="causal_lm",
        data=DataSpec(files=("{stdlib}",)),
        train=train,
        parallel=parallel,
        labels={"by": "bench"},
    )


def a_plan() -> Plan:
    """tp2 x pp2 x dp2 on four nodes of two."""
    per = [tuple(Device(NodeId(f"node-{number}"), index) for index in range(2)) for number in range(4)]
    pipelines = tuple(
        Pipeline(
            stages=(Stage(first=0, last=3, devices=per[i]), Stage(first=3, last=6, devices=per[i + 1])),
            micro_batches=(i // 2, i // 2 + 2),
        )
        for i in (0, 2)
    )
    return Plan(pipelines=pipelines, reason="all four nodes are used")


def a_record(id: JobId, state: JobState) -> JobRecord:
    now, plan = time.time(), a_plan()
    record = JobRecord(id=id, spec=a_spec(), state=state, created_at=now)
    if isinstance(state, Queued):
        return replace(record, spec=a_spec(devices=4096))
    return replace(
        record,
        generation=Generation(1),
        plans={Generation(1): plan},
        started_at=now,
        committed=Step(100),
        typical_step_s=0.2,
    )


def running() -> Running:
    return Running(generation=Generation(1), plan=a_plan())


def entry(record: JobRecord, type: str) -> HistoryEntry:
    status = status_of(record.state).value
    return HistoryEntry(job=record.id, at=time.time(), type=type, message=type, status=status, step=record.committed)
