"""How torchft recovers: survivors go on at a reduced batch, the replica that died comes back and copies from one of them.

Gradients are reduced here as one flat tensor, clipped after that, and committed by torchft's vote.

    torchrun --max-restarts N ... -m benchmarks.peers.torchft_job SPEC REPLICA REPLICAS LOG
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo

from .ground import Ground, StepLog, arguments
from .replica import Replica

COLLECTIVE_TIMEOUT_S = 10
TIMEOUT_S = 20


def main() -> None:
    spec_file, number, count, log_file = arguments(4)
    ground = Ground(spec_file, rank=int(number), world_size=int(count))
    replica = Replica(ground)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)),
        load_state_dict=replica.load,
        state_dict=replica.state,
        min_replica_size=2,
        use_async_quorum=True,
        timeout=timedelta(seconds=TIMEOUT_S),
        replica_id=f"replica-{number}",
        rank=0,
        world_size=1,
    )
    optimizer = Optimizer(manager, replica.optimizer)
    log = StepLog(log_file, ground.rank)
    parameters = list(replica.module.parameters())
    while manager.current_step() < ground.train.steps:
        optimizer.zero_grad()  # begins the quorum of this step
        replica.backward(manager.current_step() + 1)
        _reduce(manager, parameters)
        # Only now: one that comes back learns with the quorum which step the others are at.
        done = manager.current_step()
        ground.set_rate(replica.optimizer, done + 1)
        norm = torch.nn.utils.clip_grad_norm_(parameters, ground.train.clip_norm)
        optimizer.step()
        if manager.current_step() > done:
            log.done(done + 1, float(norm), members=manager.num_participants())


def _reduce(manager: Manager, parameters: list[torch.nn.Parameter]) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main()
