"""`everstep plan`: what a job would run as, on the server's nodes or on a cluster that is not there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from api.client.calls import read_job_file, read_mapping
from api.client.errors import ClientError
from api.plan_files import PlanRequest
from api.plan_views import ForecastView
from api.schemas import read
from orchestrator.domain.errors import Refused

from . import plan_tables as tables
from .session import REFUSED, USAGE, fail, hint, out, print_json, session_of

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(app: typer.Typer) -> None:
    app.command()(plan)
    app.command()(validate)


def plan(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A job file: YAML, TOML or JSON.", exists=True, dir_okay=False)
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            help="A cluster file, in YAML, TOML or JSON; it need not exist anywhere else.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a job would run as: by node, its step time and memory, what else was tried, what it survives.

    Without --cluster: on the server's nodes. Exit status 1 where no plan fits.
    """
    if cluster is None:
        found = session_of(ctx).client().plan(file)
    else:
        found = _beside({"job": read_job_file(file), "cluster": read_mapping(cluster)})
    if as_json:
        print_json(found)
    elif found.feasible:
        out().print(tables.forecast(found))
        hint([f"everstep submit {file} --follow"])
    else:
        fail("No plan", found.reason, [])
    if not found.feasible:
        raise typer.Exit(REFUSED)


def validate(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A job file: YAML, TOML or JSON.", exists=True, dir_okay=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Check a job file as a submission would, its program included, and change nothing. Exit status 2: it is refused."""
    found = session_of(ctx).client().validate(file)
    if as_json:
        print_json(found)
        return
    out().print(f"{file} is fine; it would run as {found.shape}" if found.feasible else f"{file} is fine; it would wait")
    out().print(found.reason)
    hint([f"everstep submit {file} --follow"])


def _beside(asked: dict[str, Any]) -> ForecastView:
    """Planned in a process of its own: no server is needed. Raises Refused, ClientError."""
    read(PlanRequest, asked)
    if importlib.util.find_spec("torch") is None:
        fail("Not installed", "describing a job's program needs torch; run: pip install 'everstep[worker]'", [])
        raise typer.Exit(USAGE)
    done = subprocess.run(
        [sys.executable, "-m", "deploy.plans"], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise ClientError(f"the planner ended with exit status {done.returncode}; see what it said above") from None
    if "refused" in said:
        raise Refused(said["refused"])
    return ForecastView.model_validate(said["result"])
