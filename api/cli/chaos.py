"""`everstep chaos`: faults on purpose, one at a time or by a schedule, and what became of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from api.chaos import KINDS, FaultRequest, Schedule
from api.client import Client
from api.client.calls import read_job_file
from api.client.chaos import Chaos, ReportView, Said, make_report, replay_of
from api.documents import load_mapping
from api.schemas import read
from api.views import FaultView, StepView
from orchestrator.domain.errors import Refused
from orchestrator.domain.faults import POINTS

from .session import find_job, hint, out, print_json, session_of

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")]
STARTS_S = 240.0


def register(app: typer.Typer) -> None:
    chaos = typer.Typer(
        no_args_is_help=True, help="Make things fail on purpose and see what becomes of it (needs everstep up --chaos)."
    )
    for name, command in (
        ("kinds", kinds), ("inject", inject), ("run", run), ("report", report), ("replay", replay)
    ):  # fmt: skip
        chaos.command(name)(command)
    app.add_typer(chaos, name="chaos")


def kinds(as_json: AsJson = False) -> None:
    """What can be made to fail, and the points at which a rank can be killed."""
    if as_json:
        print_json({"kinds": {str(kind): what for kind, what in KINDS.items()}, "points": list(POINTS)})
        return
    table = Table("kind", "what happens", box=None, header_style="dim")
    for kind, what in KINDS.items():
        table.add_row(kind, what)
    out().print(table)
    out().print(f"[dim]points[/]  {', '.join(POINTS)}")
    hint(["everstep chaos inject kill last --at after_vote", "everstep chaos run last --faults 20"])


def inject(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="See everstep chaos kinds.")],
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of the current generation.")] = None,
    device: Annotated[str | None, typer.Option(help="node/index")] = None,
    node: Annotated[str | None, typer.Option()] = None,
    pipeline: Annotated[int | None, typer.Option(min=0)] = None,
    stage: Annotated[int | None, typer.Option(min=0)] = None,
    tp: Annotated[int | None, typer.Option(min=0)] = None,
    at: Annotated[str | None, typer.Option(help="A fault point.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="In this step or later.")] = None,
    duration_s: Annotated[float | None, typer.Option("--for", min=0, help="Seconds, of what ends by itself.")] = None,
    factor: Annotated[float | None, typer.Option(min=0, help="How many times slower; bytes/s of a slow link.")] = None,
    jump_s: Annotated[float | None, typer.Option("--jump", help="Seconds, of the clock.")] = None,
    exit_code: Annotated[int | None, typer.Option(min=0, max=255)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Picks one where several are meant.")] = None,
    beyond_mirrors: Annotated[
        bool, typer.Option("--beyond-mirrors", help="Also where the last copy of something would go.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make one thing fail."""
    client = session_of(ctx).client()
    given: dict[str, Any] = {
        "kind": kind, "job": find_job(client, job) if job else None, "rank": rank, "device": device, "node": node,
        "pipeline": pipeline, "stage": stage, "tp": tp, "at": at, "step": step, "duration_s": duration_s,
        "factor": factor, "jump_s": jump_s, "exit_code": exit_code, "seed": seed,
        "beyond_mirrors": beyond_mirrors or None,
    }  # fmt: skip
    accepted = client.inject(read(FaultRequest, {name: value for name, value in given.items() if value is not None}))
    if as_json:
        print_json(accepted)
    else:
        out().print(accepted.message)
        hint([f"everstep chaos report {given['job'] or 'last'}", "everstep events -f last"])


def run(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB|FILE", help="A running job, or a job file to submit first.")],
    schedule: Annotated[Path | None, typer.Option("--schedule", help="A .yaml or .json file.")] = None,
    num_faults: Annotated[int | None, typer.Option("--faults", min=1, help="How many to draw.")] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    twin: Annotated[bool, typer.Option("--twin", help="Run the job again without faults, and compare.")] = False,
    as_json: AsJson = False,
) -> None:
    """Carry out a schedule of faults on a job; its report says what became of each."""
    given = _file(schedule) if schedule else {}
    given |= {"num_faults": num_faults} if num_faults is not None else {}
    given |= {"seed": seed} if seed is not None else {}
    _run(ctx, job, read(Schedule, given), twin, as_json)


def replay(
    ctx: typer.Context,
    recorded: Annotated[Path, typer.Argument(metavar="REPORT", help="What `chaos run --json` printed.")],
    job: Annotated[str, typer.Argument(metavar="JOB|FILE")],
    twin: Annotated[bool, typer.Option("--twin", help="Run the job again without faults, and compare.")] = False,
    as_json: AsJson = False,
) -> None:
    """Carry out the faults of an earlier run again: the same kinds, devices and steps."""
    _run(ctx, job, replay_of(ReportView.model_validate(_file(recorded))), twin, as_json)


def report(ctx: typer.Context, job: Job, as_json: AsJson = False) -> None:
    """Every fault on purpose of a job and its verdict."""
    client = session_of(ctx).client()
    name = find_job(client, job)
    found = client.faults(name)
    _print(make_report(client.job(name), list(client.all_metrics(name)), found, seed=0), as_json)


# --- details -------------------------------------------------------------------------------------------------------------


def _run(ctx: typer.Context, job: str, schedule: Schedule, twin: bool, as_json: bool) -> None:
    client = session_of(ctx).client(retry_s=30.0)
    is_file = Path(job).suffix in (".yaml", ".yml", ".json")
    name = client.submit(read_job_file(Path(job))).id if is_file else find_job(client, job)
    chaos = Chaos(client, name, schedule, (lambda _: None) if as_json else _say)
    if not as_json:
        out().print(f"seed {schedule.seed}, {len(schedule.faults) or schedule.num_faults} faults on {name}")
    chaos.run()
    _print(chaos.report(_twin_of(client, name, as_json) if twin else ()), as_json)


def _twin_of(client: Client, job: str, as_json: bool) -> list[StepView]:
    """The same job undisturbed, after this one: it may need the same devices."""
    if not as_json:
        out().print("[dim]waiting for the job to end, then for its undisturbed twin[/]")
    over = client.wait(job)
    again = client.submit(_accepted(over.spec)).id
    client.wait(again)
    return list(client.all_metrics(again))


def _accepted(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "name": f"{spec['name']}-twin"[:63]}


def _file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    return dict(load_mapping(text, "application/json" if path.suffix == ".json" else "application/yaml"))


def _say(said: Said) -> None:
    out().print(f"  {said.message}" if said.fault else f"[dim]{said.message}[/]", soft_wrap=True)


def _print(found: ReportView, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    table = Table("kind", "at", "hit", "detected as", "in s", "pause s", "again", "verdict", box=None, header_style="dim")
    for view in found.faults:
        table.add_row(*_row(view))
    out().print(table)
    verdicts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(found.verdicts.items()))
    curve = {None: "nothing to compare", True: "equal", False: "NOT equal"}[found.curve_equal]
    out().print(
        f"{found.num_faults} carried out: {verdicts or 'none'}; curve {curve}; {found.steps_lost} steps lost, "
        f"{found.steps_doubled} doubled, {found.steps_rolled_back} rolled back"
    )
    for view in found.faults:
        if view.verdict in ("undetected", "job_failed", "refused"):
            out().print(f"  {view.kind} {view.id}: {view.verdict.replace('_', ' ')}, {view.why}", soft_wrap=True)


def _row(view: FaultView) -> tuple[str, ...]:
    hit = ", ".join(view.devices) or "control plane"
    times = ("" if value is None else f"{value:.3f}" for value in (view.detected_s, view.pause_s))
    where = f"{view.at} {view.step}" if view.at else str(view.step)
    return (view.kind, where, hit, view.detected_as, *times, str(view.rolled_back or ""), view.verdict.replace("_", " "))
