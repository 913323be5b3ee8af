"""What delivering webhooks needs of the outside world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.domain.hooks import Attempt, Delivery, Hook, Standing
from orchestrator.domain.ids import JobId

from .choosing import NodesSeen

MAX_HOOKS = 100
KEPT = 500
"""Deliveries of one hook, pending ones included: for one more the oldest goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A job whose history goes on after the entry with this number."""

    job: JobId
    after: int


class Noted(StrEnum):
    OK = "OK"
    STALE = "STALE"
    """Another has the lease, and has sent it or will."""
    CHANGED = "CHANGED"
    """The hook's standing is not what this was decided on: decide again."""


class HookStore(Protocol):
    """Every method raises Unavailable. Those that take a holder change nothing unless it has the lease."""

    async def add(self, hook: Hook) -> None:
        """It is told of what happens from now on. Raises Conflict where there are too many."""
        ...

    async def hooks(self) -> tuple[tuple[Hook, Standing], ...]:
        """Oldest first."""
        ...

    async def hook(self, id: str) -> tuple[Hook, Standing]:
        """Raises NotFound."""
        ...

    async def remove(self, id: str) -> None:
        """With all its deliveries. Raises NotFound."""
        ...

    async def pause(self, id: str, why: str, now: float) -> None:
        """What is pending waits; what happens meanwhile is not told. Raises NotFound; twice is no error."""
        ...

    async def resume(self, id: str, now: float) -> None:
        """What was pending is sent. Raises NotFound."""
        ...

    async def put(self, delivery: Delivery) -> None:
        """To be sent when it is due, also by a hook that is paused. Raises NotFound where the hook is gone."""
        ...

    async def deliveries(self, id: str) -> tuple[Delivery, ...]:
        """Newest first."""
        ...

    async def delivery(self, id: str, delivery: str) -> Delivery:
        """Raises NotFound."""
        ...

    # --- whoever sends ----------------------------------------------------------------------------------------------------

    async def hold(self, holder: str, ttl_s: float) -> bool:
        """Take or keep the lease; False while another has it, or where there is no hook."""
        ...

    async def release(self, holder: str) -> None: ...

    async def unread(self, limit: int) -> Sequence[Unread]:
        """Jobs with history that has not been looked at; about so many at a time."""
        ...

    async def nodes_seen(self) -> NodesSeen | None: ...

    async def note(
        self,
        holder: str,
        read: Sequence[tuple[JobId, int | None]],
        deliveries: Sequence[Delivery],
        nodes: NodesSeen | None = None,
    ) -> bool:
        """All at once: how far each job was read (None: to its end), and what is to be sent. False: not the holder."""
        ...

    async def due(self, now: float, limit: int, each: int) -> tuple[Delivery, ...]:
        """What is to be sent by now, what was due first first; of one hook no more than `each`."""
        ...

    async def tried(self, holder: str, delivery: Delivery, before: Standing, standing: Standing) -> Noted:
        """What has become of an attempt; a standing that is paused holds the hook's other deliveries."""
        ...


class HookSecrets(Protocol):
    def put(self, id: str, secret: str) -> None: ...

    def get(self, id: str) -> str:
        """Raises Refused where it is not there."""
        ...

    def remove(self, id: str) -> None: ...


class Sender(Protocol):
    async def send(self, url: str, headers: dict[str, str], body: bytes) -> Attempt:
        """Once. Never raises for what the other side does."""
        ...
