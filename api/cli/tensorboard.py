"""`everstep tensorboard JOB`: a job's committed steps as event files, by TensorBoard's own writer.

A step that was rolled back is run again under a later generation. Readers of event files keep whatever came first, or draw
both, unless they are told: before such a step a session begins at it, and TensorBoard drops what it has from there on.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.client import Client, EventView, GapView, StepView
from api.views import TERMINAL

from .session import DETACHED, USAGE, fail, find_job, hint, out, print_json, session_of

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_S = 5.0


def register(app: typer.Typer) -> None:
    app.command()(tensorboard)


def tensorboard(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")],
    logdir: Annotated[Path, typer.Option("--logdir", help="A folder for the job is made in it.")] = Path("runs"),
    is_followed: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Write a job's curves as TensorBoard event files; steps that were run again replace what they replaced."""
    if importlib.util.find_spec("tensorboard") is None:
        fail("Not installed", "the writer is TensorBoard's own; run: pip install 'everstep[tensorboard]'")
        raise typer.Exit(USAGE)
    client = session_of(ctx).client(30.0 if is_followed else 2.0)
    job_id = find_job(client, job)
    folder = logdir / job_id
    if any(folder.glob("events.out.tfevents.*")):
        fail("There already", f"{folder} holds event files; the same steps twice would be drawn twice: remove them first")
        raise typer.Exit(USAGE)
    code = 0
    with Curves(folder) as curves:
        try:
            for step in _following(client, job_id) if is_followed else client.all_metrics(job_id):
                curves.add(step)
        except KeyboardInterrupt:
            code = DETACHED
    if as_json:
        print_json({"job": job_id, "logdir": str(folder), "steps": curves.num_steps, "purges": curves.num_purges})
    else:
        again = f", {curves.num_purges} times from an earlier step on again" if curves.num_purges else ""
        out().print(f"{folder}: {curves.num_steps} steps{again}")
        hint([f"tensorboard --logdir {logdir}"])
    raise typer.Exit(code)


class Curves:
    """The event files of one job. Steps come in the order in which they were committed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter | None = None
        self._last = 0
        self._flushed_at = 0.0
        self.num_steps = 0
        self.num_purges = 0

    def __enter__(self) -> Curves:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, step: StepView) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        at = step.at.timestamp()
        if step.step <= self._last:
            self._write(at, step.step, session_log=SessionLog(status=SessionLog.START))
            self.num_purges += 1
        self._last = step.step
        self._write(at, step.step, summary=_summary(step))
        self.num_steps += 1
        if self._writer is not None and time.monotonic() - self._flushed_at > FLUSH_S:
            self._writer.flush()
            self._flushed_at = time.monotonic()

    def _write(self, at: float, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        assert self._writer is not None, "used as a context"
        self._writer.add_event(Event(wall_time=at, step=step, **what))


def values(step: StepView) -> Iterator[tuple[str, float]]:
    """By the names that torchtitan's users know, where they have one."""
    found = {
        "loss_metrics/global_avg_loss": step.loss,
        "grad_norm": step.norm,
        "validation_metrics/loss": step.eval_loss,
        "time_metrics/end_to_end(s)": step.seconds,
        "throughput(tps)": step.tokens / step.seconds if step.seconds else None,
        "time_metrics/slowest_rank_computes(s)": max(step.busy.values(), default=None),
        "time_metrics/quickest_rank_computes(s)": min(step.busy.values(), default=None),
        "everstep/generation": float(step.generation),
    }
    for name, value in found.items():
        if value is not None and math.isfinite(value):
            yield name, value


def _summary(step: StepView) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values(step)])


def _following(client: Client, job: str) -> Iterable[StepView]:
    for event in client.events(job):
        if isinstance(event, StepView):
            yield event
        elif isinstance(event, GapView):
            out().print("steps before this one are no longer kept", style="yellow")
        elif isinstance(event, EventView) and event.status in TERMINAL:
            return
