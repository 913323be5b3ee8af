"""One replica of the job's model among equals: its micro-batches, and the gradients of one step of them.

How replicas meet, reduce and recover is each peer's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from torch import nn

from worker.program import StageModule

from .ground import Ground


class _Deferring(Protocol):
    def no_sync(self) -> AbstractContextManager[None]: ...


class Replica:
    """The whole model. Gradients are sums over the step's tokens times the number of replicas, to be averaged over them."""

    def __init__(self, ground: Ground) -> None:
        self.module: StageModule = ground.module(0, ground.profile.num_layers)
        self.optimizer = ground.optimizer(self.module)
        self._ground = ground
        self._ids = _ids(ground)
        train = ground.train
        self._scale = ground.world_size / (train.micro_batches * train.micro_batch_size * train.sequence)

    def backward(self, step: int, wrapped: nn.Module | None = None) -> None:
        """wrapped: a DistributedDataParallel around the module, which reduces once, with the last micro-batch."""
        model = wrapped or self.module
        inputs, targets = self._ground.batch(step, self._ids)
        count = len(self._ids)
        for place, (number, x, target) in enumerate(
            zip(self._ids, inputs.chunk(count), targets.chunk(count), strict=True), start=1
        ):
            is_last = wrapped is None or place == count
            with nullcontext() if is_last else cast(_Deferring, wrapped).no_sync():
                logits = model(x, ids=torch.tensor([number]), step=torch.tensor([step]))
                (self.module.loss(logits, target) * self._scale).backward()  # type: ignore[no-untyped-call]

    def update(self, step: int) -> float:
        """Clip and apply; the gradients' norm."""
        self._ground.set_rate(self.optimizer, step)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._ground.train.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def state(self) -> dict[str, object]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        self.module.load_state_dict(cast(dict[str, torch.Tensor], state["module"]))
        self.optimizer.load_state_dict(cast(dict[str, object], state["optimizer"]))


def _ids(ground: Ground) -> list[int]:
    ids, world = ground.train.micro_batches, ground.world_size
    if ids % world:
        raise SystemExit(f"{ids} micro-batches cannot be dealt out evenly to {world} replicas; use a multiple")
    return list(range(ids * ground.rank // world, ids * (ground.rank + 1) // world))
