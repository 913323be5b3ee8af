"""Commands that become another process of the service: `everstep api`, `supervisor`, `secret`. Options are its own."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from .session import USAGE, fail, session_of

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h"]}
_MODULES = {"api": "deploy.api_server", "supervisor": "deploy.supervisor_main", "secret": "deploy.secret_files"}
_NEEDS = ("ray", "redis", "fastapi", "uvicorn")


def register(app: typer.Typer) -> None:
    app.command("api", context_settings=PASS_ON)(api)
    app.command("supervisor", context_settings=PASS_ON)(supervisor)
    app.command("secret", context_settings=PASS_ON)(secret)


def api(ctx: typer.Context) -> None:
    """Serve the REST API and the dashboard, in this process; several may. `everstep api --help` lists its options."""
    _become(ctx, "api")


def supervisor(ctx: typer.Context) -> None:
    """Supervise jobs, in this process; a second one waits for the lease. Options: `everstep supervisor --help`."""
    _become(ctx, "supervisor")


def secret(ctx: typer.Context) -> None:
    """Keep values that job files name under `secrets`, on this machine: `set NAME`, `ls`, `rm NAME`; -h for each."""
    _become(ctx, "secret")


def _become(ctx: typer.Context, name: str) -> None:
    """Replaced by it, so that whoever started this (systemd, a container) signals it and nobody between."""
    missing = [library for library in _NEEDS if importlib.util.find_spec(library) is None]
    if missing:
        fail("Not installed", f"the server needs {', '.join(missing)}; run: pip install 'everstep[server,worker]'")
        raise typer.Exit(USAGE)
    arguments = list(ctx.args)
    source = ctx.find_root().get_parameter_source("state_dir")
    if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT") and "--state-dir" not in arguments:
        arguments = ["--state-dir", str(session_of(ctx).state_dir), *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", _MODULES[name], *arguments])
