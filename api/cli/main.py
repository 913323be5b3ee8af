"""The `everstep` command: options that all commands share, and the commands by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.client.errors import ClientError
from api.version import release

from . import (
    access,
    adopt,
    bundle,
    chaos,
    checkpoints,
    cluster,
    config,
    hooks,
    jobs,
    logs,
    plans,
    queue,
    service,
    simulate,
    tensorboard,
    top,
    verbs,
)
from .session import DEFAULT_STATE_DIR, Guarded, Session, out, print_json, session_of

app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Elastic, fault-tolerant training: submit a job, watch it, kill what it runs on, watch it go on.",
    epilog="JOB is a job's id, the name of its newest job, or [cyan]last[/cyan]. Exit status: 0 succeeded, 100 failed, "
    "101 not finished, 102 not found, 103 cancelled, 2 usage, 3 not allowed, 4 no server, 130 detached.",
)


@app.callback()
def shared(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Option("--url", envvar="EVERSTEP_URL", help="The server; else read from the state directory.")
    ] = None,
    state_dir: Annotated[
        Path, typer.Option("--state-dir", envvar="EVERSTEP_STATE_DIR", help="Where the local cluster keeps everything.")
    ] = DEFAULT_STATE_DIR,
) -> None:
    ctx.obj = Session(url, state_dir.expanduser())


@app.command("version")
def show_version(ctx: typer.Context, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Version of this client, and of the server where one runs."""
    try:
        server = session_of(ctx).client(retry_s=0).server_version()
    except ClientError:
        server = None
    if as_json:
        print_json({"client": release(), "server": server})
    else:
        out().print(f"everstep {release()} (server: {server or 'none running'})")


jobs.register(app)
logs.register(app)
verbs.register(app)
plans.register(app)
simulate.register(app)
cluster.register(app)
queue.register(app)
checkpoints.register(app)
adopt.register(app)
chaos.register(app)
access.register(app)
hooks.register(app)
top.register(app)
bundle.register(app)
tensorboard.register(app)
config.register(app)
service.register(app)
