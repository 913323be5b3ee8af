"""How Ray Train v2 recovers: data parallelism with a checkpoint at every step, all workers started again by its controller.

python -m benchmarks.peers.raytrain_job SPEC WORKERS MAX_FAILURES RAY_FOLDER LOG
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.ground import Ground, StepLog, arguments
from benchmarks.peers.replica import Replica

OBJECT_STORE_BYTES = 128 << 20
FILE = "checkpoint.pt"


def train(config: dict[str, str]) -> None:
    """In each worker; by value, so it imports nothing relative to this module."""
    context = ray.train.get_context()
    ground = Ground(config["spec"], rank=context.get_world_rank(), world_size=context.get_world_size())
    replica, done = Replica(ground), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / FILE)
        replica.load(saved)
        done = int(saved["step"])
    wrapped = DistributedDataParallel(replica.module)
    log = StepLog(config["log"], ground.rank)
    for step in range(done + 1, ground.train.steps + 1):
        replica.backward(step, wrapped)
        norm = replica.update(step)
        if ground.rank == 0:
            with TemporaryDirectory() as made:
                torch.save(replica.state() | {"step": step}, Path(made) / FILE)
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(made))
        else:
            ray.train.report({"step": step})
        log.done(step, norm)


def main() -> None:
    spec_file, workers, max_failures, ray_folder, log_file = arguments(5)
    count = int(workers)
    ray.init(
        address="local",
        num_cpus=count + 2,  # whatever the machine has: the trainer's controller wants some as well
        include_dashboard=False,
        log_to_driver=True,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=ray_folder,
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"spec": spec_file, "log": log_file},
        scaling_config=ray.train.ScalingConfig(num_workers=count),
        run_config=ray.train.RunConfig(
            storage_path=str(Path(spec_file).resolve().parent / "raytrain-storage"),
            failure_config=ray.train.FailureConfig(max_failures=int(max_failures)),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
