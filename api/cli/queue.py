"""Commands about jobs that share the cluster: the queue, and how many devices a project may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from api.views import ProjectView, WaitingView

from . import render
from .session import hint, out, print_json, session_of

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(app: typer.Typer) -> None:
    app.command("queue")(queue)
    group = typer.Typer(help="List projects, what they hold and may hold; set a quota.")
    group.callback(invoke_without_command=True)(projects)
    group.command("set-quota")(set_quota)
    app.add_typer(group, name="projects")


def queue(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List jobs that wait for devices, the next one first, and why each waits."""
    found = session_of(ctx).client().queue()
    if as_json:
        print_json(found)
    elif not found:
        out().print("nobody waits")
    else:
        out().print(_queue_table(found))
        hint([f"everstep get {found[0].job}", f"everstep scale {found[-1].job} --priority 10"])


def projects(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List projects, what they hold and may hold; set a quota."""
    if ctx.invoked_subcommand:
        return
    found = session_of(ctx).client().projects()
    if as_json:
        print_json(found)
    else:
        out().print(_projects_table(found))
        hint([f"everstep projects set-quota {found[0].name} 8"])


def set_quota(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="PROJECT")],
    devices: Annotated[str, typer.Argument(metavar="DEVICES", help="Of all its jobs together; `none` for no limit.")],
    as_json: AsJson = False,
) -> None:
    """Bound how many devices a project's jobs have together; what they have already, they keep."""
    if devices != "none" and not (devices.isascii() and devices.isdigit()):
        raise typer.BadParameter(f"DEVICES is {devices!r}, must be a whole number or none")
    accepted = session_of(ctx).client().set_quota(name, None if devices == "none" else int(devices))
    if as_json:
        print_json(accepted)
    else:
        out().print(accepted.message)
        hint(["everstep projects", "everstep queue"])


def _queue_table(found: Sequence[WaitingView]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("#", "JOB", "PRIORITY", "PROJECT", "NEEDS", "WAITS", "REASON"):
        table.add_column(name, justify="right" if name in ("#", "PRIORITY", "NEEDS", "WAITS") else "left")
    table.columns[1].no_wrap = True
    for one in found:
        why = Text.assemble((one.reason, "yellow"), f" {one.message}")
        row = (str(one.position), Text(one.job, "bold"), str(one.priority), Text(one.project), str(one.least))
        table.add_row(*row, render.age(one.since), why)
    return table


def _projects_table(found: Sequence[ProjectView]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("PROJECT", "DEVICES", "QUOTA", "WAITING"):
        table.add_column(name, justify="left" if name == "PROJECT" else "right")
    for one in found:
        quota = "none" if one.max_devices is None else str(one.max_devices)
        table.add_row(Text(one.name, "bold"), str(one.num_devices), quota, str(one.num_waiting))
    return table
