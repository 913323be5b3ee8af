"""Training processes on one shared device, each obeying the test: a control thread that aborts, a main thread that trains.

NCCL refuses two ranks on one device of one host; told that each is a host of its own it serves them, over sockets.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.domain.generation import Answer, RankReport
from orchestrator.domain.ids import Generation, JobId, Step
from orchestrator.domain.origin import FromMemory, Restore
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import JobSpec
from tests.integration.rank_processes import Child, tell
from worker.checkpoint.handover import NoSnapshots
from worker.data.sources import load
from worker.digest import digest
from worker.loop import Trainer
from worker.parallel.device import device_of
from worker.parting import why_left
from worker.program import load_program
from worker.progress import Unwatched
from worker.session import Session
from worker.state.kept import step_of


@dataclass(frozen=True, kw_only=True)
class Train:
    """plan: rank r of it is the process of that number."""

    plan: Plan
    generation: int
    restore: Restore
    last: int


@dataclass(frozen=True)
class Abort:
    """Of whatever generation is under way."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    answers: list[Answer]
    hashes: tuple[int, int]
    """Of what is owned and of what is mirrored."""
    step_s: float
    """The last step."""


@dataclass(frozen=True, kw_only=True)
class Left:
    report: RankReport
    reason: str
    """Why, where that is not the program's own error."""
    after_s: float | None
    """Since the abort; None where there was none."""


def obey(child: Child, spec: JobSpec) -> None:
    """Runs in the rank's process until killed."""
    for name, value in (
        ("NCCL_HOSTID", f"rank-{child.rank}"),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_NET", "Socket"),
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_DEBUG", "WARN"),
    ):
        os.environ.setdefault(name, value)
    inbox: queue.Queue[Train] = queue.Queue()
    now: dict[str, Any] = {}
    threading.Thread(target=_control, args=(child, inbox, now), daemon=True).start()
    device = device_of(spec.train.device, 0)
    device.activate()
    program = load_program(spec.program)
    profile = program.describe(spec)
    trainer: Trainer | None = None
    while True:
        order = inbox.get()
        faulthandler.dump_traceback_later(30)  # says where a test that hangs does
        seat = order.plan.seats[child.rank]
        if trainer is None:
            trainer = Trainer(
                spec,
                profile,
                program,
                load(spec.data),
                seat.device,
                Unwatched(),
                NoSnapshots(),
                device.torch_device,
            )
        now.clear()
        now["session"] = session = Session(
            plan=order.plan,
            profile=profile,
            seat=seat,
            generation=Generation(order.generation),
            job=JobId("job"),
            listener=child.listener,
            addresses={s.device: child.addresses[s.rank] for s in order.plan.seats},
            mirrors=1,
            moves=order.restore.moves if isinstance(order.restore, FromMemory) else (),
            backend=spec.recovery.backend,
            progress=Unwatched(),
            form_timeout_s=60.0,
        )
        try:
            tell(child, _train(child, order, session, trainer))
        except Exception as error:
            left = time.monotonic()
            reason = why_left(error)
            if reason is None and "aborted" not in now:
                raise
            traceback.print_exc()
            tell(
                child,
                Left(
                    report=trainer.report(Generation(order.generation)),
                    reason=f"{type(reason).__name__}: {reason}",
                    after_s=left - now["aborted"] if "aborted" in now else None,
                ),
            )
        session.close()


def _train(child: Child, order: Train, session: Session, trainer: Trainer) -> Trained:
    session.open()
    form = FormGeneration(
        generation=Generation(order.generation), plan=order.plan, addresses={}, restore=order.restore, committed=Step(0)
    )
    trainer.restore(session, form)
    answers, began = [], time.monotonic()
    for step in range(step_of(order.restore) + 1, order.last + 1):
        began = time.monotonic()
        answers.append(trainer.step(session, Step(step)))
        tell(child, step)
    held = trainer.holdings
    assert held is not None
    step_s = time.monotonic() - began
    hashes = [int(digest(*part)) for part in (held.state[:, : held.owned], held.state[:, held.owned :])]
    return Trained(answers=answers, hashes=(hashes[0], hashes[1]), step_s=step_s)


def _control(child: Child, inbox: queue.Queue[Train], now: dict[str, Any]) -> None:
    while True:
        order = child.pipe.recv()
        if isinstance(order, Train):
            inbox.put(order)
            continue
        now["aborted"] = time.monotonic()
        now["session"].abort()


def said(ranks: Any, rank: int, kind: type, timeout_s: float = 90.0) -> Any:
    """The next of this kind that the rank says."""
    while not isinstance(found := ranks.receive(rank, timeout_s), kind):
        assert not isinstance(found, Left | Trained), found
    return found


def until_step(ranks: Any, rank: int, step: int) -> None:
    while said(ranks, rank, int) < step:
        pass


torch.set_num_threads(1)
