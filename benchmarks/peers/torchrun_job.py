"""How torch itself recovers: data parallelism with a checkpoint at every step, restarted by `torchrun --max-restarts`.

Every rank logs its steps, so that whoever kills one sees who came back and when.

    torchrun --max-restarts N ... -m benchmarks.peers.torchrun_job SPEC CHECKPOINT LOG
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .ground import Ground, StepLog, arguments
from .replica import Replica


def main() -> None:
    spec_file, checkpoint_file, log_file = arguments(3)
    ground, checkpoint = Ground(spec_file), Path(checkpoint_file)
    _join(ground)
    replica, done = Replica(ground), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        replica.load(saved)
        done = int(saved["step"])
    wrapped = DistributedDataParallel(replica.module)
    log = StepLog(log_file, ground.rank)
    for step in range(done + 1, ground.train.steps + 1):
        replica.backward(step, wrapped)
        norm = replica.update(step)
        if ground.rank == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save(replica.state() | {"step": step}, partial)
            partial.replace(checkpoint)
        log.done(step, norm)


def _join(ground: Ground) -> None:
    """A prefix per restart: on torch 2.13 gloo does not form again on a store that holds an earlier attempt's keys."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    attempt = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=attempt, rank=ground.rank, world_size=ground.world_size)


if __name__ == "__main__":
    main()
