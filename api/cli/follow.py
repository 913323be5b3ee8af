"""Watching one job to its end, live: progress, loss, rate, generation, and each recovery as a small table of phases.

On a terminal one picture that redraws itself; elsewhere plain lines. Knows a client and a console, nothing of commands.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.client import Client, Event
from api.views import EventView, JobView, StepView

from . import render

REFRESH_PER_S = 8
LOOK_AGAIN_S = 0.3
"""While a recovery is under way its ledger is read at most this often."""
RECENT_STEPS = 20
LINES = 4
SPARKS = "▁▂▃▄▅▆▇█"
OnStep = Callable[[StepView], None]


def follow(client: Client, job_id: str, console: Console, on_step: OnStep | None = None) -> JobView:
    """The job once it has ended. on_step is called with every committed step, in order; what it raises ends the watch."""
    watch = Watch(client.job(job_id))
    if console.is_terminal:
        with Live(watch, console=console, refresh_per_second=REFRESH_PER_S, vertical_overflow="ellipsis"):
            _run(client, watch, on_step, lambda event: None)
            watch.job = client.wait(job_id)
    else:
        console.print(render.title(watch.job), soft_wrap=True)
        _run(client, watch, on_step, lambda event: _print_plainly(console, watch, event))
        watch.job = client.wait(job_id)
        for incident in watch.job.incidents:
            console.print(render.incident_table(incident))
    console.print(render.outcome(watch.job))
    return watch.job


def _run(client: Client, watch: Watch, on_step: OnStep | None, show: Callable[[Event], None]) -> None:
    looked_at = time.monotonic()
    for event in client.events(watch.job.id):
        watch.see(event)
        show(event)
        now = time.monotonic()
        is_news = isinstance(event, EventView) and not watch.is_catching_up
        if is_news or (watch.has_open_incident and now - looked_at > LOOK_AGAIN_S):
            watch.job, looked_at = client.job(watch.job.id), now
        if isinstance(event, StepView) and on_step is not None:
            on_step(event)


class Watch:
    """What has been seen of a job so far, and how it looks. Another thread draws it: attributes are replaced."""

    def __init__(self, job: JobView) -> None:
        self.job = job
        self.status = job.status
        self.step = 0
        self.generation = 0
        self.last: StepView | None = None
        self._known_step = job.step
        self._losses: tuple[float, ...] = ()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._events: tuple[EventView, ...] = ()

    @property
    def is_catching_up(self) -> bool:
        """Still reading what had happened before the watch began."""
        return self.step < self._known_step

    @property
    def has_open_incident(self) -> bool:
        return any(incident.pause_s is None for incident in self.job.incidents)

    @property
    def step_s(self) -> float | None:
        recent = tuple(self._seconds)
        return median(recent) if recent else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.last.tokens / self.step_s if self.last is not None and self.step_s else None

    def see(self, event: Event) -> None:
        if isinstance(event, StepView):
            self.last, self.step, self.generation = event, event.step, event.generation
            if event.loss is not None:
                self._losses = (*self._losses, event.loss)
            if event.seconds is not None:
                self._seconds.append(event.seconds)
        elif isinstance(event, EventView):
            self.status, self.generation = event.status, event.generation or self.generation
            self._events = (*self._events, event)[-LINES:]

    # --- how it looks --------------------------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = ["", self._title(), Padding(self._progress(), (1, 0, 0, 0)), self._figures()]
        *earlier, latest = self.job.incidents or (None,)
        if latest is not None:
            parts += [
                "",
                *(render.incident_line(incident) for incident in earlier[-3:] if incident),
                render.incident_table(latest),
            ]
        parts += ["", *(render.event_line(event) for event in self._events), ""]
        return Group(*parts)

    def _title(self) -> RenderableType:
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        name = Text.assemble((self.job.name, "bold"), ("  " + self.job.id, "dim"))
        state = render.status(self.status)
        if self.generation:
            state.append(f"  generation {self.generation}", "not bold default")
        table.add_row(name, state)
        where = self.job.plan_summary or self.job.reason
        if where:
            table.add_row(Text(where, "dim"), "")
        return table

    def _progress(self) -> RenderableType:
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        done = ProgressBar(
            total=self.job.steps, completed=self.step, complete_style=self._style(), finished_style="bold green"
        )
        share = f"{100 * self.step / self.job.steps:3.0f} %"
        left = (self.job.steps - self.step) * self.step_s if self.step_s and self.step < self.job.steps else None
        more = f"  {render.duration(left)} left" if left is not None else ""
        table.add_row(done, Text.assemble((f"step {self.step}/{self.job.steps}", "bold"), f"  {share}", (more, "dim")))
        return table

    def _figures(self) -> Text:
        if self.last is None:
            return Text("waiting for the first step", "dim")
        line = Text.assemble(("loss ", "dim"), (render.number(self.last.loss, ".4f"), "bold"), "  ")
        line.append(sparkline(self._losses, 24), "cyan")
        if self.tokens_per_s is not None and self.step_s is not None:
            line.append(f"  {self.tokens_per_s:,.0f}", "bold").append(" tokens/s", "dim")
            line.append(f"  {render.seconds(self.step_s)}", "bold").append(" per step", "dim")
        return line

    def _style(self) -> str:
        return render.STYLES.get(self.status, "green")


def sparkline(values: tuple[float, ...], width: int) -> str:
    """The whole curve in `width` characters at most; each shows the mean of its share of the values."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / span * len(SPARKS)))] for mean in means)


def _print_plainly(console: Console, watch: Watch, event: Event) -> None:
    if isinstance(event, EventView):
        console.print(render.event_line(event), soft_wrap=True)
    elif isinstance(event, StepView):
        every = max(1, watch.job.steps // 20)
        if event.step % every == 0 or event.step in (1, watch.job.steps):
            rate = f"  {watch.tokens_per_s:,.0f} tokens/s" if watch.tokens_per_s else ""
            loss = render.number(event.loss, ".4f")
            clock = event.at.astimezone().strftime("%H:%M:%S")
            console.print(
                f"{clock}  step {event.step}/{watch.job.steps}  loss {loss}{rate}  generation {event.generation}",
                soft_wrap=True,
            )
