"""Commands that do one thing to a job, or to every job that a filter selects: cancel, pause, resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import typer

from api.client import Client
from orchestrator.domain.state import JobStatus

from .jobs import AsJson, IfRevision, labels_of, to_many
from .session import USAGE, fail, find_job, hint, out, print_json, session_of

Verb = Literal["cancel", "pause", "resume"]
WORDS: dict[Verb, str] = {
    "cancel": "Stop a job, or every job that a filter selects; it ends CANCELLED and keeps its checkpoints.",
    "pause": "Have a job saved and its devices given up; it goes on from there when it is resumed, and no step is lost.",
    "resume": "Have a paused job go on, or every one that a filter selects.",
}
NEXT: dict[Verb, str] = {"cancel": "wait", "pause": "resume", "resume": "events -f"}
MaybeJob = Annotated[str | None, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")]
States = Annotated[list[JobStatus] | None, typer.Option("--state", "-s", help="Every open job in this state; repeatable.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="That carries this label; repeatable.")
]
Project = Annotated[str | None, typer.Option("--project", help="Every open job of this project.")]
IsDry = Annotated[bool, typer.Option("--dry-run", help="Only say which jobs those are.")]
IsSure = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


def register(app: typer.Typer) -> None:
    for verb, words in WORDS.items():
        app.command(verb, help=words)(_command(verb))


def _command(verb: Verb) -> Callable[..., None]:
    def command(
        ctx: typer.Context,
        job: MaybeJob = None,
        state: States = None,
        label: Labels = None,
        project: Project = None,
        is_dry: IsDry = False,
        is_sure: IsSure = False,
        if_revision: IfRevision = None,
        as_json: AsJson = False,
    ) -> None:
        if (job is not None) == bool(state or label or project):
            fail(f"Which jobs to {verb}?", "name one, or select some with --state, --label or --project")
            raise typer.Exit(USAGE)
        if if_revision is not None and job is None:
            raise typer.BadParameter("--if-revision is of one job; name it")
        client = session_of(ctx).client()
        if job is not None:
            _to_one(client, verb, find_job(client, job), if_revision, as_json)
        else:
            select = partial(client.to_many, verb, state=list(state or ()), labels=labels_of(label), project=project)
            to_many(verb, select, is_dry, is_sure or as_json, as_json)

    return command


def _to_one(client: Client, verb: Verb, job: str, if_revision: int | None, as_json: bool) -> None:
    ask = {"cancel": client.cancel, "pause": client.pause, "resume": client.resume}[verb]
    accepted = ask(job, if_revision=if_revision)
    if as_json:
        print_json(accepted)
        return
    out().print(accepted.message)
    hint([f"everstep {NEXT[verb]} {job}", f"everstep get {job}"])
