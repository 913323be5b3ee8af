"""`everstep top`: jobs and nodes as they are now, in one picture that redraws itself until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from api.client import ApiError, Client, JobView, NodeView, Unreachable
from api.views import TERMINAL, JobSummary

from . import render
from .session import hint, out, print_json, session_of

PATIENT_S = 30.0
FIGURES = ("STEP", "STEP TIME", "TOKENS/S", "MFU", "RANKS", "RECOV.", "PAUSE", "GOODPUT")
WIDE, ONLY_WIDE = 130, frozenset({"STEP TIME", "MFU", "RANKS", "PAUSE"})
"""Characters from which on a terminal shows ids and all figures."""
MAX_DETAILS = 20
"""Open jobs of which ranks and pauses are shown; each is a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    at: datetime
    jobs: tuple[JobView | JobSummary, ...]
    """Open ones first, the newest first; of MAX_DETAILS of them everything."""
    nodes: tuple[NodeView, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "at": self.at.isoformat(timespec="milliseconds"),
            "jobs": [_row(job) for job in self.jobs],
            "nodes": [node.model_dump(mode="json") for node in self.nodes],
        }


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    ctx: typer.Context,
    every_s: Annotated[float, typer.Option("--every", min=0.2, max=3600, help="Seconds between two looks.")] = 1.0,
    is_once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Jobs shown.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One picture, machine-readable.")] = False,
) -> None:
    """Jobs, ranks, step times and pauses, live."""
    client = session_of(ctx).client(2.0)
    picture = look(client, limit)
    if as_json:
        print_json(picture.as_json())
        return
    console = out()
    if is_once or not console.is_terminal:
        console.print(show(picture, console.width))
        hint(["everstep get JOB", "everstep nodes"])
        return
    try:
        with Live(show(picture, console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                trouble = ""
                try:
                    picture = look(client, limit)
                except (Unreachable, ApiError) as error:
                    trouble = str(error)  # what was last known stays, and says that it is old
                live.update(show(picture, console.width, trouble), refresh=True)
    except KeyboardInterrupt:
        hint(["everstep get JOB", "everstep events -f JOB"])


def look(client: Client, limit: int) -> Picture:
    """Raises ApiError, Unreachable."""
    page = client.jobs(limit=limit).jobs
    ordered = sorted(page, key=lambda job: job.status in TERMINAL)  # stable: the newest first in both halves
    detailed: list[JobView | JobSummary] = []
    for number, job in enumerate(ordered):
        is_worth_it = job.status not in TERMINAL and number < MAX_DETAILS
        detailed.append(client.job(job.id) if is_worth_it else job)
    return Picture(at=datetime.now(UTC), jobs=tuple(detailed), nodes=tuple(client.nodes()))


def show(picture: Picture, width: int, trouble: str = "") -> RenderableType:
    parts: list[RenderableType] = [
        _headline(picture, trouble),
        jobs_table(picture.jobs, width) if picture.jobs else Text("no jobs"),
    ]
    if picture.nodes:
        parts += [Text(""), render.nodes_table(picture.nodes)]
    return Group(*parts)


def jobs_table(jobs: Sequence[JobView | JobSummary], width: int) -> Table:
    """width: of the terminal, in characters; where that is little, what matters less is left out."""
    is_wide = width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("JOB", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("STATUS", no_wrap=True, min_width=11)
    names = [name for name in FIGURES if is_wide or name not in ONLY_WIDE]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for job in jobs:
        figures = _figures(job)
        title = f"{job.name} {job.id}" if is_wide else job.name
        shown = Text(title, "dim" if job.status in TERMINAL else "")
        table.add_row(shown, render.status(job.status), *(figures[name] for name in names))
    return table


def _figures(job: JobView | JobSummary) -> dict[str, str]:
    row = _row(job)
    return {
        "STEP": f"{job.step}/{job.steps}",
        "STEP TIME": render.seconds(row["step_s"]) if row["step_s"] is not None else "–",
        "TOKENS/S": f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "–",
        "MFU": f"{100 * row['mfu']:.3g} %" if row["mfu"] is not None else "–",
        "RANKS": str(row["ranks"] or "–"),
        "RECOV.": str(job.recoveries or "–"),
        "PAUSE": render.seconds(row["last_pause_s"]) if row["last_pause_s"] is not None else "–",
        "GOODPUT": f"{100 * row['goodput']:.0f} %" if row["goodput"] is not None else "–",
    }


def _headline(picture: Picture, trouble: str) -> Text:
    running = sum(job.status == "RUNNING" for job in picture.jobs)
    up = sum(node.status == "UP" for node in picture.nodes)
    devices = sum(node.num_devices for node in picture.nodes if node.status == "UP")
    line = Text.assemble(
        ("everstep ", "bold"),
        (picture.at.astimezone().strftime("%H:%M:%S"), "dim"),
        f"  {running} of {len(picture.jobs)} jobs train, {up} of {len(picture.nodes)} nodes up, {devices} devices",
    )
    if trouble:
        line.append(f"\nno news since then: {trouble}", "bold red")
    return line


def _row(job: JobView | JobSummary) -> dict[str, Any]:
    whole = job if isinstance(job, JobView) else None
    pauses = [one.pause_s for one in whole.incidents if one.pause_s is not None] if whole else []
    return {
        "id": job.id,
        "name": job.name,
        "status": job.status,
        "reason": job.reason,
        "step": job.step,
        "steps": job.steps,
        "step_s": whole.typical_step_s if whole else None,
        "tokens_per_s": job.tokens_per_s,
        "mfu": whole.mfu if whole else None,
        "ranks": len(whole.plan.seats) if whole and whole.plan else 0,
        "generation": job.generation,
        "recoveries": job.recoveries,
        "last_pause_s": pauses[-1] if pauses else None,
        "goodput": whole.goodput.share if whole and whole.goodput else None,
    }
