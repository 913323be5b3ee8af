"""The supervisor ends, its store is put back to what it was, and the next supervisor begins: hosts remember the job."""

from __future__ import annotations

import asyncio
import time
from copy import copy
from pathlib import Path

import pytest

from orchestrator.adapters.memory import MemoryStore
from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.state import Cancelled
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, Rig, a_rig

pytestmark = pytest.mark.timeout(240)


class Store(MemoryStore):
    """One that can be put back. Streams stay, for the reader of this test to see what happens."""

    KEPT = ("_news", "_streams", "_last")

    def copied(self) -> dict[str, object]:
        def of(value: object) -> object:
            return copy(value) if isinstance(value, dict | set | list) else value

        return {name: of(value) for name, value in self.__dict__.items() if name not in self.KEPT}

    def restore(self, copied: dict[str, object]) -> None:
        self.__dict__.update({name: copy(value) for name, value in copied.items()})


async def put_back(rig: Rig, store: Store, copied: dict[str, object]) -> None:
    await rig.stop_supervisor()
    store.restore(copied)
    rig.start_supervisor()


def test_job_trains_on_from_what_its_hosts_remember(tmp_path: Path) -> None:
    spec = a_job(steps=ENDLESS)
    pids: list[dict[object, int]] = []

    async def scenario() -> None:
        async with a_rig(tmp_path, num_devices=2) as rig:
            await rig.stop_supervisor()
            store = rig.store = Store(time.time)
            empty, early = store.copied(), dict[str, object]()
            rig.start_supervisor()

            async def disturb(step: int) -> None:
                went_back = [entry for entry in rig.history if entry.type == "store_went_back"]
                if step == 3:
                    early.update(store.copied())
                elif step == 9:
                    await rig.kill_rank(2)
                elif len(pids) == 0:
                    job = await store.get(JOB)
                    if job.incidents and job.incidents[0].pause_s is not None:
                        pids.append(dict(job.pids))
                        await put_back(rig, store, early)  # its records have another generation and other processes
                elif len(pids) == 1 and len(went_back) == 1:
                    pids.append(dict((await store.get(JOB)).pids))
                    await put_back(rig, store, empty)  # nothing is recorded of what its hosts do
                elif len(pids) == 2 and len(went_back) == 2:
                    pids.append(dict((await store.get(JOB)).pids))
                    await store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST], "and nothing was closed since"
            assert job.incidents[0].rolled_back == 0
            assert pids[0] == pids[1] == pids[2], "no process was replaced"
            assert largest_gap(rig.losses, spec, max(rig.losses)) <= 1e-5

    asyncio.run(scenario())
