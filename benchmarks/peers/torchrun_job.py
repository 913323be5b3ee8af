"""How torch itself recovers: data parallelism with a checkpoint at every step, restarted by `torchrun --max-restarts`.

Every rank logs its steps, so that whoever kills one sees who came back and when.

    torchrun --max-restarts N ... -m benchmarks.peers.torchrun_job SPEC CHECKPOINT LOG
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .ground import Ground, StepLog, arguments


def main() -> None:
    spec_file, checkpoint_file, log_file = arguments(3)
    ground, checkpoint = Ground(spec_file), Path(checkpoint_file)
    _join(ground)
    module = ground.module(0, ground.profile.num_layers)
    optimizer = ground.optimizer(module)
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        done = int(saved["step"])
    wrapped = DistributedDataParallel(module)
    log = StepLog(log_file, ground.rank)
    train, ids = ground.train, _ids(ground)
    scale = ground.world_size / (train.micro_batches * train.micro_batch_size * train.sequence)
    for step in range(done + 1, train.steps + 1):
        ground.set_rate(optimizer, step)
        inputs, targets = ground.batch(step, ids)
        for place, (number, x, target) in enumerate(
            zip(ids, inputs.chunk(len(ids)), targets.chunk(len(ids)), strict=True), start=1
        ):
            # Gradients are reduced once, with the last micro-batch.
            with nullcontext() if place == len(ids) else wrapped.no_sync():
                logits = wrapped(x, ids=torch.tensor([number]), step=torch.tensor([step]))
                (module.loss(logits, target) * scale).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if ground.rank == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
            partial.replace(checkpoint)
        log.done(step, float(norm))


def _join(ground: Ground) -> None:
    """A prefix per restart: on torch 2.13 gloo does not form again on a store that holds an earlier attempt's keys."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    attempt = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=attempt, rank=ground.rank, world_size=ground.world_size)


def _ids(ground: Ground) -> list[int]:
    ids, world = ground.train.micro_batches, ground.world_size
    if ids % world:
        raise SystemExit(f"{ids} micro-batches cannot be dealt out evenly to {world} replicas; use a multiple")
    return list(range(ids * ground.rank // world, ids * (ground.rank + 1) // world))


if __name__ == "__main__":
    main()
