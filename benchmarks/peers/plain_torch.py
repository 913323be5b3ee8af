"""The same model and global batch with what torch has: pipelining + DistributedDataParallel + AdamW, on gloo.

torch has no tensor parallelism for this program's layers, so the tp ranks become further replicas: tp 1, the job's depth of
pipeline, and as many pipelines as there are ranks for. Gradients, clipping and schedule are those of the job, so the norms
in its log are those of the undisturbed run.

    torchrun ... -m benchmarks.peers.plain_torch SPEC PP LOG
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from worker.program import StageModule

from .ground import Ground, StepLog, arguments


def main() -> None:
    spec_file, depth, log_file = arguments(3)
    ground, pp = Ground(spec_file), int(depth)
    dist.init_process_group("gloo")
    dp = ground.world_size // pp
    replica, number = divmod(ground.rank, pp)
    ids = _ids(ground.train.micro_batches, replica, dp)
    if len(ids) < pp:
        raise SystemExit(f"replica {replica} of {dp} gets {len(ids)} micro-batches, 1F1B needs {pp}; raise micro_batches")
    # Every rank makes every group, in the same order.
    pipelines = [dist.new_group([p * pp + s for s in range(pp)]) for p in range(dp)]
    replicas = [dist.new_group([p * pp + s for p in range(dp)]) for s in range(pp)]
    first, last = _bounds(ground.profile.num_layers, pp, number)
    module = ground.module(first, last)
    data_parallel = DistributedDataParallel(module, process_group=replicas[number])
    schedule = _schedule(ground, module, data_parallel, number, pp, pipelines[replica], dp, len(ids))
    optimizer = ground.optimizer(module)
    log = StepLog(log_file, ground.rank) if ground.rank == 0 else None
    for step in range(1, ground.train.steps + 1):
        ground.set_rate(optimizer, step)
        inputs, targets = ground.batch(step, ids)
        schedule.step(
            *((inputs,) if number == 0 else ()),
            target=targets if number == pp - 1 else None,
            return_outputs=False,
            ids=torch.tensor(ids),
            step=torch.full((len(ids),), step),
        )
        norm = _clip(module, ground.train.clip_norm, pipelines[replica])
        optimizer.step()
        optimizer.zero_grad()
        if log is not None:
            log.done(step, norm)
    dist.destroy_process_group()


def _schedule(
    ground: Ground,
    module: StageModule,
    wrapped: nn.Module,
    number: int,
    pp: int,
    group: dist.ProcessGroup,
    dp: int,
    num_ids: int,
) -> Schedule1F1B:
    train = ground.train
    tokens = torch.empty(train.micro_batch_size, train.sequence, dtype=torch.int64, device="meta")
    hidden = torch.empty(module.hidden_shape, dtype=module.hidden_dtype, device="meta", requires_grad=True)
    logits = torch.empty(module.logits_shape, dtype=module.hidden_dtype, device="meta", requires_grad=True)
    stage = PipelineStage(
        wrapped,
        number,
        pp,
        torch.device("cpu"),
        input_args=tokens if number == 0 else hidden,
        output_args=logits if number == pp - 1 else hidden,
        group=group,
    )
    # DDP averages over replicas; the loss is a mean over the step's tokens, so the sum is wanted.
    scale = dp / (train.micro_batches * train.micro_batch_size * train.sequence)
    return Schedule1F1B(stage, num_ids, loss_fn=lambda out, target: module.loss(out, target) * scale, scale_grads=False)


def _clip(module: nn.Module, clip_norm: float, pipeline: dist.ProcessGroup) -> float:
    """By the norm over all stages; each has the whole of its own gradients after DDP."""
    parameters = list(module.parameters())
    squares = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    dist.all_reduce(squares, group=pipeline)
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return float(norm)


def _ids(micro_batches: int, replica: int, dp: int) -> list[int]:
    return list(range(micro_batches * replica // dp, micro_batches * (replica + 1) // dp))


def _bounds(num_layers: int, pp: int, number: int) -> tuple[int, int]:
    return num_layers * number // pp, num_layers * (number + 1) // pp


if __name__ == "__main__":
    main()
