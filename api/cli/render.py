"""How things look in a terminal: tables, one job's page, one line per event. Takes views, prints nothing itself.

Text from jobs is never read as markup.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from api.views import (
    CopyView,
    EventView,
    GapView,
    IncidentView,
    JobSummary,
    JobView,
    NodeView,
    PlanView,
    SeatView,
    SubmittedView,
)

STYLES = {
    "PENDING": "yellow",
    "STARTING": "cyan",
    "RUNNING": "green",
    "RECOVERING": "bold magenta",
    "RESIZING": "magenta",
    "STOPPING": "yellow",
    "PAUSING": "blue",
    "PAUSED": "bold blue",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "CANCELLED": "yellow",
    "UP": "green",
    "UNREACHABLE": "yellow",
    "LOST": "bold red",
}
MARKS = {"SUCCEEDED": "✓", "FAILED": "✗", "CANCELLED": "■", "PAUSED": "‖", "LOST": "✗"}
BAR_WIDTH = 24
STACK_LINES = 12


def status(word: str) -> Text:
    return Text(f"{MARKS.get(word, '●')} {word}", STYLES.get(word, ""))


def submitted(job: SubmittedView) -> Text:
    return Text.assemble(("✓ ", "green"), (job.id, "bold"), f" submitted ({job.name})")


# --- tables --------------------------------------------------------------------------------------------------------------


def jobs_table(jobs: Sequence[JobSummary]) -> Table:
    table = _table()
    table.add_column("JOB", no_wrap=True, min_width=30)
    table.add_column("NAME", no_wrap=True, overflow="ellipsis")
    table.add_column("STATUS", no_wrap=True, min_width=12)
    table.add_column("STEP", justify="right", no_wrap=True, min_width=max(len(f"{job.step}/{job.steps}") for job in jobs))
    table.add_column("RECOV.", justify="right", no_wrap=True, min_width=6)
    table.add_column("AGE", justify="right", no_wrap=True, min_width=6)
    for job in jobs:
        table.add_row(
            Text(job.id, "bold"),
            Text(job.name),
            _standing(job),
            f"{job.step}/{job.steps}",
            str(job.recoveries or "–"),
            age(job.created_at),
        )
    return table


def _standing(job: JobSummary) -> Text:
    if job.archived_at is not None:
        return Text.assemble(status(job.status), (" archived", "dim"))
    if job.waiting is None:
        return status(job.status)
    return Text.assemble(status(job.status), (f" #{job.waiting.position} {job.waiting.reason}", "dim"))


def nodes_table(nodes: Sequence[NodeView]) -> Table:
    table = _table()
    are_labelled = any(node.labels for node in nodes)
    are_cordoned = any(_scheduling(node).plain != "open" for node in nodes)
    extra = [*(["SCHEDULING"] if are_cordoned else []), *(["LABELS"] if are_labelled else [])]
    for name in ("NODE", "KIND", "DEVICES", "STATUS", "ADDRESS", *extra):
        table.add_column(name, justify="right" if name == "DEVICES" else "left", no_wrap=True)
    for node in nodes:
        labels = ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
        table.add_row(
            Text(node.id, "bold"),
            Text(node.kind),
            str(node.num_devices),
            status(node.status),
            Text(node.address),
            *([_scheduling(node)] if are_cordoned else []),
            *([Text(labels, "dim")] if are_labelled else []),
        )
    return table


def _scheduling(node: NodeView) -> Text:
    if node.admission in ("checking", "refused") and node.scheduling == "open":
        return Text(node.admission, "yellow")
    goes = ", then goes" if node.removed else ""
    by = f" by {node.deadline:%H:%M:%S}" if node.deadline else ""
    return Text(f"{node.scheduling}{goes}{by}", "dim" if node.scheduling == "open" else "yellow")


def kept_out(nodes: Sequence[NodeView]) -> list[Text]:
    """A line for each node and device that no plan may use."""
    until = {"testing": "until its self-test has passed", "held": "until you release it"}
    refused = [
        Text(f"{node.id} is refused: {node.admission_reason}{f' ({node.checked})' if node.checked else ''}", "yellow")
        for node in nodes
        if node.admission == "refused"
    ]
    return refused + [
        Text(
            f"{one.device} is kept out {until[one.standing]}: {one.reason}{f' ({one.said})' if one.said else ''}", "yellow"
        )
        for node in nodes
        for one in node.quarantine
        if one.standing in until
    ]


def job_page(job: JobView) -> RenderableType:
    parts: list[RenderableType] = [title(job), _facts(job)]
    if job.plan is not None:
        parts += ["", plan_table(job.plan)]
    for incident in job.incidents[-5:]:
        parts += ["", incident_table(incident)]
    if job.failure is not None:
        parts += ["", failure(job)]
    return Group(*parts)


def title(job: JobView) -> Text:
    line = Text.assemble((job.name, "bold"), "  ", (job.id, "dim"), "  ", status(job.status))
    if job.generation:
        line.append(f"  generation {job.generation}", "dim")
    return line


def _facts(job: JobView) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if job.reason and job.failure is None:
        table.add_row("reason", Text(job.reason))
    rate = f"  {job.tokens_per_s:,.0f} tokens/s" if job.tokens_per_s else ""
    pace = f"  {job.typical_step_s:.3f} s/step" if job.typical_step_s else ""
    table.add_row("step", f"{job.step} of {job.steps}  loss {number(job.loss, '.4f')}{rate}{pace}")
    if job.mfu is not None:
        table.add_row("mfu", f"{100 * job.mfu:.3g} % of what its devices' data sheets say, in bf16")
    if job.evaluation is not None:
        loss = number(job.evaluation.loss, ".4f")
        table.add_row("evaluation", f"loss {loss} on held-out text after step {job.evaluation.step}")
    if job.num_params:
        table.add_row("model", f"{job.num_params:,} parameters, {job.tokens_per_step:,} tokens per step")
    table.add_row("created", when(job.created_at) + (f", started {when(job.started_at)}" if job.started_at else ""))
    if job.finished_at is not None:
        table.add_row(
            "finished", f"{when(job.finished_at)}, after {duration((job.finished_at - job.created_at).total_seconds())}"
        )
    if job.size.target or job.size.max_devices:
        most = f"{job.size.min_devices} to {job.size.max_devices or 'any number of'} devices"
        table.add_row("size", f"{most}, {job.size.target} wanted" if job.size.target else most)
    if job.next_action_at is not None:
        what = "it is saved and ended, because it has had its time" if job.started_at else "it is given up unless it trains"
        table.add_row("deadline", f"{when(job.next_action_at)}: {what}")
    if not job.is_over:
        table.add_row("revision", f"{job.revision}, for --if-revision")
    if job.archived_at is not None:
        table.add_row("archived", f"{when(job.archived_at)}: its history, steps and logs are gone")
    if job.waiting is not None:
        place = f"number {job.waiting.position} ({job.waiting.reason})"
        table.add_row("queue", f"{place}, needs {job.waiting.least} devices")
    if job.user is not None:
        table.add_row("user", job.user)
    if job.priority or job.project != "default":
        table.add_row("priority", f"{job.priority}, project {job.project}")
    for spare in job.spares:
        table.add_row("spare", Text(f"{spare.node}, {'stands by' if spare.is_ready else 'getting ready'}"))
    if job.at_risk:
        table.add_row("at risk", Text(job.at_risk, "yellow"))
    if job.false_alarms:
        table.add_row("false alarms", f"{job.false_alarms}, suspected hangs that were none")
    for line in copies(job.copies):
        table.add_row(line.split(" ", 1)[0], line.split(" ", 1)[1])
    if job.checkpoint is not None:
        table.add_row("checkpoint", Text(f"step {job.checkpoint.step}, {job.checkpoint.path}"))
    return table


def copies(found: Sequence[CopyView]) -> list[str]:
    """`saving step 40: 1.2 of 3.4 GB on 4 devices, 210 MB/s`, one line for each kind and step."""
    lines = []
    for what, step in sorted({(one.what, one.step) for one in found}):
        parts = [one for one in found if (one.what, one.step) == (what, step)]
        done, total = sum(one.done_bytes for one in parts), sum(one.total_bytes for one in parts)
        where = parts[0].device if len(parts) == 1 else f"{len(parts)} devices"
        rate = sum(one.bytes_per_s for one in parts)
        lines.append(f"{what} step {step}: {size(done)} of {size(total)} on {where}, {size(rate)}/s")
    return lines


def size(num_bytes: float) -> str:
    """`812 B`, `1.5 MB`, `20 GB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 999.5 and len(units) > 1:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"


def plan_table(plan: PlanView) -> RenderableType:
    """Pipelines down, stages across, ranks and their devices inside."""
    depth = max(seat.stage for seat in plan.seats) + 1
    table = _table()
    table.add_column("PIPELINE", justify="right")
    for stage in range(depth):
        table.add_column(f"STAGE {stage}")
    table.add_column("MICRO-BATCHES")
    for index, ids in enumerate(plan.micro_batches):
        cells = [_cell([s for s in plan.seats if (s.pipeline, s.stage) == (index, stage)]) for stage in range(depth)]
        table.add_row(str(index), *cells, _ids(ids))
    return Group(Text.assemble((f"plan {plan.summary}", "bold"), (f"  {plan.reason}" if plan.reason else "", "dim")), table)


def _cell(seats: Sequence[SeatView]) -> Text:
    if not seats:
        return Text("–", "dim")
    first, last = seats[0].layers
    cell = Text(f"layers {first}–{last - 1}" if last - first > 1 else f"layer {first}", "dim")
    for seat in seats:
        cell.append(f"\nrank {seat.rank} ", "bold").append(seat.device).append(
            f" pid {seat.pid}" if seat.pid else "", "dim"
        )
    return cell


def _ids(ids: Sequence[int]) -> str:
    """`0–3, 7` of 0 1 2 3 7."""
    runs: list[list[int]] = []
    for id in ids:
        if runs and id == runs[-1][-1] + 1:
            runs[-1].append(id)
        else:
            runs.append([id])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# --- recoveries ----------------------------------------------------------------------------------------------------------


def incident_line(incident: IncidentView) -> Text:
    word = "resize" if incident.is_resize else "recovery"
    generations = f"generation {incident.generation} → {incident.next_generation or '…'}"
    pause = f"pause {seconds(incident.pause_s)}" if incident.pause_s is not None else "under way"
    style = "green" if incident.pause_s is not None else "magenta"
    cause = incident.cause.replace("_", " ")
    return Text.assemble((f"{word} {incident.number}", "bold"), f"  {cause}  ", (generations, "dim"), "  ", (pause, style))


def incident_table(incident: IncidentView) -> RenderableType:
    """One recovery: what was seen, what was done, and where the time went."""
    parts: list[RenderableType] = [incident_line(incident), Padding(Text(incident.message, "dim"), (0, 0, 0, 2))]
    if incident.decision:
        parts.append(Padding(Text(incident.decision, "dim"), (0, 0, 0, 2)))
    if incident.rung:
        parts.append(Padding(_rung(incident), (0, 0, 0, 2)))
    if incident.phases:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", min_width=10)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        longest = max(incident.phases.values()) or 1.0
        for name, value in incident.phases.items():
            expected = f"  {seconds(incident.predicted[name])} expected" if name in incident.predicted else ""
            line = Text.assemble((bar(value / longest, BAR_WIDTH), "magenta"), (expected, "dim"))
            table.add_row(Text(name.replace("_", " ")), seconds(value), line)
        parts.append(Padding(table, (0, 0, 0, 2)))
    if incident.pause_s is not None:
        parts.append(Padding(_cost(incident), (0, 0, 0, 2)))
    if incident.stack:
        parts.append(Padding(_stack(incident.stack), (0, 0, 0, 2)))
    return Group(*parts)


def _rung(incident: IncidentView) -> Text:
    """What was taken, what that was expected to cost, and what was not taken."""
    line = Text(f"taken: {(incident.rung or '').replace('_', ' ')}")
    if incident.predicted_pause_s is not None:
        line.append(f", expected pause {seconds(incident.predicted_pause_s)}", "dim")
    for option in incident.options:
        price = seconds(option.price_s) if option.price_s is not None else "not possible"
        mark = "▸" if option.rung == incident.rung else " "
        line.append(f"\n{mark} {option.rung.replace('_', ' '):12} {price:>12}  {option.why}", "dim")
    return line


def _stack(lines: tuple[str, ...]) -> Text:
    """The innermost calls of the thread that trains come first; the rest is the API's to tell."""
    shown = "\n".join(lines[:STACK_LINES])
    left = len(lines) - STACK_LINES
    return Text(f"{shown}\n... {left} more lines" if left > 0 else shown, "dim")


def _cost(incident: IncidentView) -> Text:
    lost = f"{incident.rolled_back} committed steps run again" if incident.rolled_back else "no committed step lost"
    source = f", state from {incident.source}" if incident.source else ""
    style = "yellow" if incident.rolled_back else "green"
    return Text.assemble((lost, style), (f" at step {incident.committed}{source}", "dim"))


# --- the end -------------------------------------------------------------------------------------------------------------


def outcome(job: JobView) -> RenderableType:
    """One line on how the job ended; the failure's evidence below it."""
    line = status(job.status)
    took = duration(((job.finished_at or datetime.now(UTC)) - job.created_at).total_seconds())
    line.append(f"  step {job.step} of {job.steps} in {took}", "not bold default")
    if job.loss is not None:
        line.append(f", loss {job.loss:.4f}", "not bold default")
    if job.recoveries:
        pauses = [item.pause_s for item in job.incidents if item.pause_s is not None and not item.is_resize]
        longest = f", longest pause {seconds(max(pauses))}" if pauses else ""
        plural = "y" if job.recoveries == 1 else "ies"
        line.append(f", {job.recoveries} recover{plural}{longest}", "not bold default")
    return Group(line, failure(job)) if job.failure is not None else line


def failure(job: JobView) -> RenderableType:
    found = job.failure
    assert found is not None
    where = [f"rank {found.rank}"] if found.rank is not None else []
    where += [found.device] if found.device else []
    where += [f"exit code {found.exit_code}"] if found.exit_code is not None else []
    message = Text(found.message, "red")
    if where:
        message.append(f"\n{', '.join(where)}", "dim")
    if not found.log_tail:
        return Padding(message, (0, 0, 0, 2))
    log = Panel(
        Text("\n".join(found.log_tail)), title="last log lines", title_align="left", box=box.ROUNDED, border_style="dim"
    )
    return Group(Padding(message, (0, 0, 0, 2)), log)


# --- lines and words -----------------------------------------------------------------------------------------------------


def event_line(event: EventView | GapView) -> Text:
    if isinstance(event, GapView):
        return Text(f"{'':8}  events before {event.resumes_at} are no longer kept", "yellow")
    clock = event.at.astimezone().strftime("%H:%M:%S")
    return Text.assemble(
        (clock, "dim"), "  ", (f"{event.status:10}", STYLES.get(event.status, "")), "  ", event.message or event.type
    )


def when(instant: datetime) -> str:
    return instant.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(total_s: float) -> str:
    """`48 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    spent = timedelta(seconds=max(0, round(total_s)))
    minutes, rest = divmod(spent.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if spent.days:
        return f"{spent.days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def age(since: datetime) -> str:
    """`48 s`, `3 min`, `2 h`, `3 d`."""
    words = duration((datetime.now(UTC) - since).total_seconds()).split()
    return " ".join(words[:2])


def seconds(value: float) -> str:
    """`16 ms`, `1.25 s`."""
    return f"{value * 1000:.0f} ms" if abs(value) < 0.9995 else f"{value:.2f} s"


def bar(fraction: float, width: int) -> str:
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "") or "▏"


def number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)


def table_of(*columns: str, words: Collection[str], folds: str = "") -> Table:
    """Columns that do not wrap, but for `folds`; those named in `words` are of words, the rest of numbers."""
    table = _table()
    for name in columns:
        is_folded = name == folds
        justify: JustifyMethod = "left" if name in words else "right"
        table.add_column(name, justify=justify, no_wrap=not is_folded, overflow="fold" if is_folded else "ellipsis")
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
