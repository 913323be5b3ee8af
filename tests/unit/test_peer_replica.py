"""The replica that peers train: together they compute the job's step, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from benchmarks.peers.ground import Ground
from benchmarks.peers.replica import Replica
from benchmarks.workload import Workload
from orchestrator.domain import codec


@pytest.fixture
def spec_file(tmp_path: Path) -> Iterator[str]:
    threads = torch.get_num_threads()
    workload = Workload(name="tiny", width=16, degrees=(1, 1, 1), layers=1, sequence=16, micro_batches=4)
    path = tmp_path / "spec.json"
    path.write_bytes(codec.dumps(workload.spec()))
    yield str(path)
    torch.set_num_threads(threads)


def gradients(replica: Replica) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in replica.module.parameters() if parameter.grad is not None]


def test_the_mean_of_the_replicas_gradients_is_that_of_one_that_has_the_whole_batch(spec_file: str) -> None:
    alone = Replica(Ground(spec_file, rank=0, world_size=1))
    alone.backward(1)
    shares = [Replica(Ground(spec_file, rank=rank, world_size=4)) for rank in range(4)]
    for share in shares:
        share.backward(1)
    assert gradients(alone)
    for whole, *parts in zip(gradients(alone), *(gradients(share) for share in shares), strict=True):
        torch.testing.assert_close(torch.stack(parts).mean(0), whole)


def test_a_replica_that_loads_anothers_state_goes_on_as_that_one(spec_file: str) -> None:
    first, other = (Replica(Ground(spec_file, rank=0, world_size=1)) for _ in range(2))
    first.backward(1)
    assert first.update(1) > 0
    other.load(deepcopy(first.state()))  # as it comes from another process
    for replica in (first, other):
        replica.backward(2)
        replica.update(2)
    for mine, theirs in zip(first.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_micro_batches_that_cannot_be_dealt_out_evenly_are_refused(spec_file: str) -> None:
    with pytest.raises(SystemExit, match="4 micro-batches cannot be dealt out evenly to 3"):
        Replica(Ground(spec_file, rank=0, world_size=3))
