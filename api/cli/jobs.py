"""Commands about jobs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from api.client import Client, JobView
from api.client.calls import read_job_file
from api.views import BulkView
from orchestrator.domain.state import JobStatus
from orchestrator.ports import Sort

from . import render
from .follow import follow
from .instants import TIMES, instant_of
from .session import (
    DETACHED,
    JOB_EXIT,
    USAGE,
    fail,
    find_job,
    hint,
    out,
    print_json,
    print_json_line,
    session_of,
)

PATIENT_S = 30.0
"""A follower stays this long with a server that does not answer: it may be starting again."""

Job = Annotated[str, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")]
IfRevision = Annotated[
    int | None,
    typer.Option("--if-revision", min=0, help="Only if it is still as `everstep get` showed it then."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(app: typer.Typer) -> None:
    app.command()(submit)
    app.command()(ls)
    app.command()(get)
    app.command()(events)
    app.command()(wait)
    app.command()(scale)


def submit(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A job file: YAML, TOML or JSON.", exists=True, dir_okay=False)
    ],
    is_followed: Annotated[bool, typer.Option("--follow", "-f", help="Stay and watch until the job ends.")] = False,
    start: Annotated[
        str | None, typer.Option("--from", help="Begin with this checkpoint: its folder or URL, or a job's (the newest).")
    ] = None,
    is_weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Of --from: step 0, with moments and a schedule of its own.")
    ] = False,
    priority: Annotated[
        int | None, typer.Option("--priority", "-p", help="Higher ones come first and take devices from lower ones.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Whose quota its devices count against.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same key never makes a second job.")] = None,
    own_id: Annotated[
        str | None, typer.Option("--id", metavar="job-NAME", help="An id of your own: it never names a second job.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job."""
    if is_weights_only and start is None:
        raise typer.BadParameter("--weights-only says what to take of --from; name a checkpoint")
    client = session_of(ctx).client(PATIENT_S if is_followed else 2.0)
    more = {name: value for name, value in (("priority", priority), ("project", project)) if value is not None}
    body: Path | dict[str, Any] = file if start is None else _beginning_with(file, start, is_weights_only)
    if more:
        body = {**(read_job_file(body) if isinstance(body, Path) else body), **more}
    if key is not None and own_id is not None:
        raise typer.BadParameter("--key and --id both keep a job from being made twice; give one of them")
    job = client.submit(body, key, id=own_id)
    if not is_followed:
        if as_json:
            print_json(job)
            return
        out().print(render.submitted(job))
        hint([f"everstep events -f {job.id}", f"everstep logs -f {job.id}", f"everstep cancel {job.id}"])
        return
    if not as_json:
        out().print(render.submitted(job))
    raise typer.Exit(_watch(client, job.id, as_json))


def ls(
    ctx: typer.Context,
    state: Annotated[list[JobStatus] | None, typer.Option("--state", "-s", help="Only these; may be repeated.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="That carry this one; repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="That are called so.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Of this project.")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help=f"Submitted later: {TIMES}.")] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Submitted before that.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Submitted with the token of this name or id.")] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="By finished_at: only those that are over.")] = Sort.NEWEST,
    total: Annotated[bool, typer.Option("--total", help="Say how many there are in all.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first where nothing else is asked for."""
    now = datetime.now(UTC)
    page = (
        session_of(ctx)
        .client()
        .jobs(
            state=state or (),
            labels=labels_of(label),
            name=name,
            project=project,
            since=instant_of(since, now, "--since") if since else None,
            until=instant_of(until, now, "--until") if until else None,
            limit=limit,
            user=user,
            sort=sort.value,
            total=total,
        )
    )
    if as_json:
        print_json(page)
        return
    console = out()
    if not page.jobs:
        asked = state or label or name or project or since or until or user or sort.is_of_finished
        console.print("no jobs that are so" if asked else "no jobs yet")
        hint(["everstep submit FILE --follow"])
        return
    console.print(render.jobs_table(page.jobs))
    if page.next_cursor:
        console.print(f"  more with --limit (showing {len(page.jobs)})", style="dim")
    if page.total is not None:
        console.print(f"  {page.total} in all" if page.total_is_whole else f"  {page.total} or more", style="dim")
    hint([f"everstep get {page.jobs[0].id}"])


def labels_of(asked: list[str] | None) -> dict[str, str]:
    found = dict(one.partition("=")[::2] for one in asked or ())
    for one in asked or ():
        if "=" not in one or one.startswith("="):
            raise typer.BadParameter(f"--label is {one!r}, must be NAME=VALUE")
    return found


def get(ctx: typer.Context, job: Job, as_json: AsJson = False) -> None:
    """Show a job: its state, plan, recoveries and checkpoint."""
    client = session_of(ctx).client()
    found = client.job(find_job(client, job))
    if as_json:
        print_json(found)
        return
    out().print(render.job_page(found))
    if found.is_over:
        hint([f"everstep events {found.id}", f"everstep logs {found.id}"])
    elif found.status == "PAUSED":
        hint([f"everstep resume {found.id}", f"everstep events {found.id}"])
    else:
        hint([f"everstep events -f {found.id}", f"everstep logs -f {found.id}", f"everstep cancel {found.id}"])


def events(
    ctx: typer.Context,
    job: Job,
    is_followed: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """What has happened to a job; with -f also its steps, live."""
    client = session_of(ctx).client(PATIENT_S if is_followed else 2.0)
    job_id = find_job(client, job)
    if is_followed:
        raise typer.Exit(_watch(client, job_id, as_json))
    since = "0"
    while entries := client.history(job_id, since, 1000):
        for entry in entries:
            if as_json:
                print_json_line(entry)
            else:
                out().print(render.event_line(entry), soft_wrap=True)
        since = entries[-1].id
        if len(entries) < 1000:
            return


def wait(
    ctx: typer.Context,
    job: Job,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=0, help="Seconds; then exit 101.")] = None,
    as_json: AsJson = False,
) -> None:
    """Wait for a job to end; the exit status is the job's."""
    client = session_of(ctx).client(PATIENT_S)
    try:
        found = client.wait(find_job(client, job), timeout_s)
    except KeyboardInterrupt:
        raise typer.Exit(DETACHED) from None
    if as_json:
        print_json(found)
    else:
        out().print(render.outcome(found))
    raise typer.Exit(JOB_EXIT[found.status])


def scale(
    ctx: typer.Context,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")] = None,
    devices: Annotated[
        int | None,
        typer.Argument(metavar="[DEVICES]", min=0, help="How many it should have; 0: as many as it can use."),
    ] = None,
    least: Annotated[int | None, typer.Option("--min", min=1, help="It waits rather than run on fewer.")] = None,
    most: Annotated[int | None, typer.Option("--max", min=0, help="It never has more; 0 for no limit.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", "-p", help="Higher ones come first and take devices from lower ones.")
    ] = None,
    state: Annotated[list[JobStatus] | None, typer.Option("--state", "-s", help="Every open job in this state.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="With this label.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Every open job of this project.")] = None,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Of a filter: only say which jobs those are.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Of a filter: don't ask.")] = False,
    if_revision: IfRevision = None,
    as_json: AsJson = False,
) -> None:
    """Change how many devices a job has, or its priority; it moves while it trains, and no step is lost.

    With --state, --label or --project: of every job these select, `everstep scale --label team=nlp 4`.
    """
    is_filtered = bool(state or label or project)
    if is_filtered and devices is None and job is not None and job.isascii() and job.isdigit():
        devices, job = int(job), None
    if (job is None) != is_filtered or (is_filtered and if_revision is not None):
        fail("Which jobs to scale?", "name one, or select some with --state, --label or --project; --if-revision is of one")
        raise typer.Exit(USAGE)
    if devices is None and least is None and most is None and priority is None:
        fail("Nothing to change", "give a number of devices, --min, --max or --priority")
        raise typer.Exit(USAGE)
    client = session_of(ctx).client()
    if job is None:
        select = partial(
            client.resize_many,
            target=devices,
            min_devices=least,
            max_devices=most,
            priority=priority,
            state=state or (),
            labels=labels_of(label),
            project=project,
        )
        to_many("scale", select, is_dry, is_sure or as_json, as_json)
        return
    job_id = find_job(client, job)
    accepted = client.resize(
        job_id, target=devices, min_devices=least, max_devices=most, priority=priority, if_revision=if_revision
    )
    if as_json:
        print_json(accepted)
    else:
        out().print(accepted.message)
        hint([f"everstep events -f {job_id}", f"everstep get {job_id}"])


def to_many(verb: str, select: Callable[..., BulkView], is_dry: bool, is_sure: bool, as_json: bool) -> None:
    """Say which they are, ask, do it. select: takes dry_run."""
    if not (is_dry or is_sure):
        selected = select(dry_run=True)
        out().print(selected.message, *selected.jobs, sep="\n  ")
        if not selected.count or not typer.confirm(f"{verb} {'it' if selected.count == 1 else 'them'}?"):
            return
    done = select(dry_run=is_dry)
    if as_json:
        print_json(done)
    else:
        out().print(done.message, *(done.jobs if is_dry else ()), sep="\n  ")


def _beginning_with(file: Path, start: str, is_weights_only: bool) -> dict[str, Any]:
    body = read_job_file(file)
    section = body.get("checkpoint") or {}
    if isinstance(section, dict):  # anything else is refused by the server, in words
        place = start if "://" in start else str(Path(start).expanduser().absolute())
        begin = {"restore_from": place, "weights_only": is_weights_only}
        body["checkpoint"] = {**section, **begin}
    return body


def _watch(client: Client, job_id: str, as_json: bool) -> int:
    """Follow a job to its end; its exit status."""
    try:
        return JOB_EXIT[(_watch_as_json if as_json else _watch_live)(client, job_id).status]
    except KeyboardInterrupt:
        if not as_json:
            out().print(f"\ndetached; {job_id} goes on", style="yellow")
            hint([f"everstep events -f {job_id}", f"everstep cancel {job_id}"])
        return DETACHED


def _watch_live(client: Client, job_id: str) -> JobView:
    found = follow(client, job_id, out())
    hint([f"everstep get {job_id}"] if found.succeeded else [f"everstep get {job_id}", f"everstep logs {job_id}"])
    return found


def _watch_as_json(client: Client, job_id: str) -> JobView:
    for event in client.events(job_id):
        print_json_line(event)
    found = client.wait(job_id)
    print_json_line(found)
    return found
