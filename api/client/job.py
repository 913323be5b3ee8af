"""A handle to one job: `job = client.run("job.yaml"); job.wait()`. Holds an id and a client: nothing that gets stale.

AsyncJob is the same to be awaited, but for what a notebook shows, which cannot wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from api.views import AcceptedView, JobView, StepView

from .calls import BEGINNING, LogChunk
from .errors import ClientError
from .streaming import Event

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .client import Client


class Job:
    def __init__(self, client: Client, id: str) -> None:
        self.client = client
        self.id = id

    def __repr__(self) -> str:
        return f"Job({self.id!r} at {self.client.base_url})"

    def view(self) -> JobView:
        return self.client.job(self.id)

    def wait(self, timeout_s: float | None = None) -> JobView:
        """The job once it is over. Raises StillRunning after timeout_s."""
        return self.client.wait(self.id, timeout_s)

    def events(self, after: str = BEGINNING) -> Iterator[Event]:
        return self.client.events(self.id, after)

    def stream_metrics(self, after: str = BEGINNING) -> Iterator[StepView]:
        """Committed steps as they come, until it is over; one that was rolled back comes again, of a later generation."""
        for event in self.client.events(self.id, after):
            if isinstance(event, StepView):
                yield event

    def logs(self, **which: Any) -> LogChunk:
        """rank, device, tail, offset: as of Client.logs."""
        return self.client.logs(self.id, **which)

    def cancel(self) -> AcceptedView:
        return self.client.cancel(self.id)

    def pause(self) -> AcceptedView:
        return self.client.pause(self.id)

    def resume(self) -> AcceptedView:
        return self.client.resume(self.id)

    def scale(self, devices: int) -> AcceptedView:
        """How many it should have; 0: as many as it can use."""
        return self.client.resize(self.id, target=devices)

    def _repr_html_(self) -> str:
        """What a notebook shows: the job as it is when the cell is shown."""
        try:
            found = self.view()
        except ClientError as error:
            return f"<b>{escape(self.id)}</b>: {escape(str(error))}"
        loss = f"{found.loss:.4f}" if found.loss is not None else "–"
        rows = {
            "status": found.status,
            "step": f"{found.step} of {found.steps}",
            "loss": loss,
            "plan": found.plan_summary or found.reason or "–",
            "recoveries": str(found.recoveries),
        }
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
        return f"<table><caption>{escape(found.name)} <code>{escape(found.id)}</code></caption>{cells}</table>"


class AsyncJob:
    def __init__(self, client: AsyncClient, id: str) -> None:
        self.client = client
        self.id = id

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r} at {self.client.base_url})"

    async def view(self) -> JobView:
        return await self.client.job(self.id)

    async def wait(self, timeout_s: float | None = None) -> JobView:
        """The job once it is over. Raises StillRunning after timeout_s."""
        return await self.client.wait(self.id, timeout_s)

    def events(self, after: str = BEGINNING) -> AsyncIterator[Event]:
        return self.client.events(self.id, after)

    async def stream_metrics(self, after: str = BEGINNING) -> AsyncIterator[StepView]:
        """Committed steps as they come, until it is over; one that was rolled back comes again, of a later generation."""
        async for event in self.client.events(self.id, after):
            if isinstance(event, StepView):
                yield event

    async def logs(self, **which: Any) -> LogChunk:
        """rank, device, tail, offset: as of AsyncClient.logs."""
        return await self.client.logs(self.id, **which)

    async def cancel(self) -> AcceptedView:
        return await self.client.cancel(self.id)

    async def pause(self) -> AcceptedView:
        return await self.client.pause(self.id)

    async def resume(self) -> AcceptedView:
        return await self.client.resume(self.id)

    async def scale(self, devices: int) -> AcceptedView:
        """How many it should have; 0: as many as it can use."""
        return await self.client.resize(self.id, target=devices)
