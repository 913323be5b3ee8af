"""Commands that do one thing to a job, or to every job that a filter selects: cancel, pause, resume."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from api.client import Client

from .jobs import AsJson, State, labels_of
from .session import USAGE, fail, find_job, hint, out, print_json, session_of

MaybeJob = Annotated[str | None, typer.Argument(metavar="[JOB]", help="An id, a name, or `last`.")]
States = Annotated[list[State] | None, typer.Option("--state", "-s", help="Every open job in this state; repeatable.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="That carries this label; repeatable.")
]
IsDry = Annotated[bool, typer.Option("--dry-run", help="Only say which jobs those are.")]
IsSure = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
Verb = Literal["cancel", "pause", "resume"]
NEXT = {"cancel": "wait", "pause": "resume", "resume": "events -f"}


def register(app: typer.Typer) -> None:
    app.command()(cancel)
    app.command()(pause)
    app.command()(resume)


def cancel(
    ctx: typer.Context,
    job: MaybeJob = None,
    state: States = None,
    label: Labels = None,
    is_dry: IsDry = False,
    is_sure: IsSure = False,
    as_json: AsJson = False,
) -> None:
    """Stop a job, or every job that a filter selects; it ends CANCELLED and keeps its checkpoints."""
    _do(ctx, "cancel", job, state, label, is_dry, is_sure, as_json)


def pause(
    ctx: typer.Context,
    job: MaybeJob = None,
    state: States = None,
    label: Labels = None,
    is_dry: IsDry = False,
    is_sure: IsSure = False,
    as_json: AsJson = False,
) -> None:
    """Have a job saved and its devices given up; it goes on from there when it is resumed, and no step is lost."""
    _do(ctx, "pause", job, state, label, is_dry, is_sure, as_json)


def resume(
    ctx: typer.Context,
    job: MaybeJob = None,
    state: States = None,
    label: Labels = None,
    is_dry: IsDry = False,
    is_sure: IsSure = False,
    as_json: AsJson = False,
) -> None:
    """Have a paused job go on."""
    _do(ctx, "resume", job, state, label, is_dry, is_sure, as_json)


def _do(
    ctx: typer.Context,
    verb: Verb,
    job: str | None,
    state: list[State] | None,
    label: list[str] | None,
    is_dry: bool,
    is_sure: bool,
    as_json: bool,
) -> None:
    is_one = job is not None
    if is_one == bool(state or label):
        fail(f"Which jobs to {verb}?", "name one, or select some with --state or --label")
        raise typer.Exit(USAGE)
    client = session_of(ctx).client()
    if job is not None:
        _to_one(client, verb, find_job(client, job), as_json)
    else:
        _to_many(client, verb, list(state or ()), labels_of(label), is_dry, is_sure or as_json, as_json)


def _to_one(client: Client, verb: Verb, job: str, as_json: bool) -> None:
    accepted = {"cancel": client.cancel, "pause": client.pause, "resume": client.resume}[verb](job)
    if as_json:
        print_json(accepted)
        return
    out().print(accepted.message)
    hint([f"everstep {NEXT[verb]} {job}", f"everstep get {job}"])


def _to_many(
    client: Client, verb: Verb, states: list[State], labels: dict[str, str], is_dry: bool, is_sure: bool, as_json: bool
) -> None:
    if not (is_dry or is_sure):
        selected = client.to_many(verb, state=states, labels=labels, dry_run=True)
        out().print(selected.message, *selected.jobs, sep="\n  ")
        if not selected.count or not typer.confirm(f"{verb} {'it' if selected.count == 1 else 'them'}?"):
            return
    done = client.to_many(verb, state=states, labels=labels, dry_run=is_dry)
    if as_json:
        print_json(done)
    else:
        out().print(done.message, *(done.jobs if is_dry else ()), sep="\n  ")
