"""Commands about the service's configuration: what it is here and who says so, whether a file is one, what one may hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from api.config import schema as config_schema
from api.config_sources import DEFAULT, Resolved, resolve, value_of, variable_of
from api.schemas import JobFile
from orchestrator.domain.errors import Refused

from .session import hint, out, print_json, session_of

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
File = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML, TOML or JSON.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="As a flag would; repeatable.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="The service's configuration: what it is, whether a file is one.")
    group.command("show")(show)
    group.command("validate")(validate)
    group.command("schema")(schema)
    app.add_typer(group, name="config")


def show(ctx: typer.Context, file: File = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Every setting as it counts here, and where it comes from: default, file, environment or flag."""
    found = _resolved(ctx, file, settings)
    if as_json:
        said = {
            name: {"value": value_of(found.config, name), "from": where, "variable": variable_of(name)}
            for name, where in found.origins.items()
        }
        print_json({"file": str(found.file) if found.file else None, "settings": said})
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("SETTING", "VALUE", "FROM"):
        table.add_column(name, overflow="fold", no_wrap=name == "SETTING")
    for name, where in found.origins.items():
        style = "dim" if where == DEFAULT else "cyan"
        table.add_row(name, Text(_shown(value_of(found.config, name))), Text(where, style))
    out().print(table)
    hint(["everstep config schema", "everstep config validate FILE"])


def validate(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Else what would be read here.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Whether a configuration could be started with; exit status 2 where not, with what is wrong."""
    found = _resolved(ctx, file, settings)
    said = sum(where != DEFAULT for where in found.origins.values())
    if as_json:
        print_json({"valid": True, "file": str(found.file) if found.file else None, "settings": said})
    else:
        out().print(
            f"[green]✓[/green] {found.file or 'no file'}: {said} of {len(found.origins)} settings differ from defaults"
        )


def schema(
    is_of_job: Annotated[bool, typer.Option("--job", help="Of a job file instead.")] = False,
) -> None:
    """JSON Schema of a configuration file, for your editor."""
    typer.echo(json.dumps(JobFile.model_json_schema() if is_of_job else config_schema(), indent=2))


def _resolved(ctx: typer.Context, file: Path | None, settings: list[str] | None) -> Resolved:
    flags: dict[str, Any] = {}
    source = ctx.find_root().get_parameter_source("state_dir")
    if source is not None and source.name == "COMMANDLINE":
        flags["state_dir"] = str(session_of(ctx).state_dir)
    for one in settings or ():
        name, equals, value = one.partition("=")
        if not equals:
            raise Refused(f"--set {one!r} must be NAME=VALUE")
        flags[name] = value
    return resolve(flags, os.environ, file)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
