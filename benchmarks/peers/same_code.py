"""The same parallel code under plain torchrun: Everstep's trainer and links, without anything that looks after them.

No host, page, supervisor, checkpoint or mirror: addresses are exchanged once through torchrun's store, then it trains until
it is killed. What Everstep's steps take longer than these is the tax.

    torchrun ... -m benchmarks.peers.same_code SPEC PLAN LOG
"""

from __future__ import annotations

import gc
import os
import socket
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from orchestrator.domain import codec
from orchestrator.domain.ids import Device, Generation, JobId, Step
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import FormGeneration
from worker.checkpoint.handover import NoSnapshots
from worker.loop import Trainer
from worker.progress import Unwatched
from worker.session import Session

from .ground import Ground, StepLog, arguments


def main(*, exact: bool = False) -> None:
    spec_file, plan_file, log_file = arguments(3)
    ground = Ground(spec_file)
    spec = replace(ground.spec, train=replace(ground.spec.train, exact=exact))
    plan = codec.loads(Plan, Path(plan_file).read_bytes())
    seat = plan.seats[ground.rank]
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    form = FormGeneration(
        generation=Generation(1),
        plan=plan,
        addresses=_exchanged(plan, ground.rank, listener),
        restore=FromSeed(),
        committed=Step(0),
    )
    progress = Unwatched()
    session = Session(
        plan=plan,
        profile=ground.profile,
        seat=seat,
        generation=form.generation,
        job=JobId("same-code"),
        listener=listener,
        addresses=form.addresses,
        mirrors=0,
        moves=(),
        backend="links",
        progress=progress,
        form_timeout_s=60.0,
    )
    session.open()
    log = StepLog(log_file, ground.rank) if ground.rank == 0 else None
    trainer = Trainer(spec, ground.profile, ground.program, ground.tokens, seat.device, progress, NoSnapshots())
    trainer.restore(session, form)
    # As in a rank, which is born with it: a cheaper garbage collection must not hide a part of the tax.
    gc.collect()
    gc.freeze()
    for number in range(1, ground.train.steps + 1):
        answer = trainer.step(session, Step(number))
        if log is not None:
            log.done(number, answer.norm)
    session.close()


def _exchanged(plan: Plan, rank: int, listener: socket.socket) -> dict[Device, str]:
    """Everybody's listener, through torchrun's own store."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    store.set(f"address/{rank}", f"127.0.0.1:{listener.getsockname()[1]}")
    return {seat.device: store.get(f"address/{seat.rank}").decode() for seat in plan.seats}


if __name__ == "__main__":
    main()
