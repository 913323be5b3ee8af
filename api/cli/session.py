"""What every command shares: where the server is, how results and errors are printed, and what the exit status means.

| exit | meaning                               |
|------|---------------------------------------|
| 0    | done; the job succeeded               |
| 1    | the server refused or failed          |
| 2    | wrong usage, or a job file that can't work |
| 3    | not allowed: no token, a wrong one, or one without the role; a checkpoint is not what was written |
| 4    | no server answered                    |
| 100  | the job failed                        |
| 101  | the job has not finished              |
| 102  | no such job or node                   |
| 103  | the job was cancelled                 |
| 130  | detached with Ctrl-C; the job goes on |
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from api.client import ApiError, Client, StillRunning, Unreachable
from api.client.credentials import TOKEN, TOKEN_FILE
from api.client.errors import ClientError
from api.tokens import FILE
from orchestrator.domain.errors import Refused

OK, REFUSED, USAGE, BAD, UNREACHABLE = 0, 1, 2, 3, 4
NOT_ALLOWED = 3
FAILED, NOT_FINISHED, NOT_FOUND, CANCELLED, DETACHED = 100, 101, 102, 103, 130
JOB_EXIT = {"SUCCEEDED": OK, "FAILED": FAILED, "CANCELLED": CANCELLED}
DEFAULT_STATE_DIR = Path("~/.everstep")
LAST = "last"


@dataclass(frozen=True, slots=True)
class Session:
    url: str | None
    state_dir: Path

    def client(self, retry_s: float = 2.0) -> Client:
        """Raises Unreachable where no server is known."""
        if self.url:
            return Client(self.url, retry_s=retry_s)
        return Client(server_url(self.state_dir), token=own_token(self.state_dir), retry_s=retry_s)


def session_of(ctx: typer.Context) -> Session:
    found = ctx.find_object(Session)
    assert found is not None
    return found


def own_token(state_dir: Path) -> str | None:
    """Of the state folder, unless the environment names another one."""
    if os.environ.get(TOKEN) or os.environ.get(TOKEN_FILE):
        return None
    try:
        return (state_dir / FILE).read_text()
    except OSError:
        return None


def server_url(state_dir: Path) -> str:
    """The address that a running server wrote into its state directory. Raises Unreachable."""
    path = state_dir / "server.json"
    try:
        url = json.loads(path.read_text())["url"]
    except FileNotFoundError:
        raise Unreachable(f"no server is running from {state_dir}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{path} cannot be read ({error})") from error
    return str(url)


def find_job(client: Client, reference: str) -> str:
    """A job's id: as given, of the newest job (`last`), or of the newest job with that name."""
    if reference.startswith("job-"):
        return reference
    # A short page may have passed over jobs of projects that this client does not see.
    newest = (client.jobs(limit=1).jobs if reference == LAST else ()) or client.jobs(limit=200).jobs
    for job in newest:
        if reference in (LAST, job.name):
            return job.id
    raise ApiError({"status": 404, "detail": f"no job is called {reference!r}; see everstep ls"})


class Guarded(TyperGroup):
    """The one place where errors become a sentence on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Refused as error:
            fail("Refused", error.message, [f"{p.field}: {p.message}" for p in error.problems[1:]])
            raise typer.Exit(USAGE) from error
        except ApiError as error:
            code = {401: NOT_ALLOWED, 403: NOT_ALLOWED, 404: NOT_FOUND, 415: USAGE, 422: USAGE}.get(error.status, REFUSED)
            details = [f"{item.get('field')}: {item.get('message')}" for item in error.errors[1:]]
            fail("Not found" if code == NOT_FOUND else "Refused", error.detail, details)
            raise typer.Exit(code) from error
        except Unreachable as error:
            fail("No server", str(error))
            hint(["everstep up"], on_stderr=True)
            raise typer.Exit(UNREACHABLE) from error
        except StillRunning as error:
            fail("Not finished", str(error))
            raise typer.Exit(NOT_FINISHED) from error
        except ClientError as error:
            fail("Error", str(error))
            raise typer.Exit(REFUSED) from error


def out() -> Console:
    return Console(highlight=False)


def fail(what: str, detail: str, more: Sequence[str] = ()) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{what}: ", "bold red"), detail), soft_wrap=True)
    for line in more:
        console.print(Text(f"  also {line}", "red"), soft_wrap=True)


def hint(commands: Sequence[str], on_stderr: bool = False) -> None:
    """Where one would go from here."""
    console = Console(stderr=on_stderr, highlight=False)
    for index, command in enumerate(commands):
        console.print(Text.assemble(("  next  " if index == 0 else "        ", "dim"), (command, "cyan")), soft_wrap=True)


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any]) -> None:
    if isinstance(value, BaseModel):
        shaped: Any = value.model_dump(mode="json")
    elif isinstance(value, dict):
        shaped = value
    else:
        shaped = [item.model_dump(mode="json") for item in value]
    typer.echo(json.dumps(shaped, indent=2))


def print_json_line(value: BaseModel) -> None:
    typer.echo(value.model_dump_json())
