"""Commands about who may do what: tokens, who this client is, a browser's login link, the audit log."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from api.access_shapes import AuditView, TokenView
from orchestrator.domain.access import Role

from . import render
from .cluster import AsJson
from .session import USAGE, fail, hint, out, print_json, session_of

UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Make, list and revoke the tokens that people and programs ask with.")
    group.command("create")(create)
    group.command("ls")(list_tokens)
    group.command("revoke")(revoke)
    app.add_typer(group, name="token")
    app.command()(whoami)
    app.command()(login)
    app.command()(audit)


def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose, or what for.")],
    role: Annotated[
        list[Role] | None, typer.Option("--role", "-r", help="Repeatable; operator where none is given.")
    ] = None,
    project: Annotated[
        list[str] | None, typer.Option("--project", "-p", help="Only jobs of this one exist for it; repeatable.")
    ] = None,
    expires: Annotated[str, typer.Option(metavar="TIME", help="30m, 12h, 90d or never.")] = "90d",
    as_json: AsJson = False,
) -> None:
    """Make a token and show it, this once: only a hash of it is kept."""
    roles = [one.value for one in role or (Role.OPERATOR,)]
    made = session_of(ctx).client().create_token(name, roles, projects=project or (), expires_s=_seconds(expires))
    if as_json:
        print_json(made)
        return
    out().print(made.token, soft_wrap=True)
    until = f"until {render.when(made.expires_at)}" if made.expires_at else "for ever"
    out().print(Text(f"{made.id}: {', '.join(made.roles)} {until}; it is not shown again", "dim"))
    hint(["EVERSTEP_TOKEN=... everstep whoami", f"everstep token revoke {made.id}"])


def list_tokens(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List tokens, with when each was used last."""
    found = session_of(ctx).client().tokens()
    if as_json:
        print_json(found)
    elif not found:
        out().print("no tokens, except the state folder's own")
        hint(["everstep token create NAME --role viewer"])
    else:
        out().print(_table(found))


def revoke(
    ctx: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID", help="See everstep token ls.")],
    as_json: AsJson = False,
) -> None:
    """Have a token refused from now on, and every browser that was signed in with it."""
    revoked = session_of(ctx).client().revoke_token(token)
    if as_json:
        print_json(revoked)
    else:
        out().print(f"{revoked.id} ({revoked.name}) is refused from now on")


def whoami(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show whose token this client has, and what it may do."""
    who = session_of(ctx).client().whoami()
    if as_json:
        print_json(who)
        return
    projects = f" in {', '.join(who.projects)}" if who.projects else ""
    until = f", until {render.when(who.expires_at)}" if who.expires_at else ""
    out().print(f"{who.name} ({who.id}): {', '.join(who.roles)}{projects}{until}")


def login(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Print a link that signs a browser in to the dashboard: good once, for ten minutes."""
    link = session_of(ctx).client().login_link()
    if as_json:
        print_json({"url": link})
    else:
        out().print(link, soft_wrap=True)


def audit(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 50,
    as_json: AsJson = False,
) -> None:
    """Show who asked to have what changed, newest first."""
    found = session_of(ctx).client().audit(limit).entries
    if as_json:
        print_json(found)
        return
    for entry in found:
        out().print(_line(entry), soft_wrap=True)


def _table(tokens: list[TokenView]) -> object:
    table = render.table_of(
        "id", "name", "roles", "projects", "expires", "last used", words={"id", "name", "roles", "projects"}
    )
    for token in tokens:
        ends = "never" if token.expires_at is None else render.when(token.expires_at)
        if token.revoked_at is not None:
            ends = "revoked"
        table.add_row(
            *(
                token.id,
                token.name,
                ", ".join(token.roles),
                ", ".join(token.projects) or "all",
                ends,
                _ago(token.last_used_at),
            ),
            style=None if token.is_valid else "dim",
        )
    return table


def _ago(instant: datetime | None) -> str:
    return "never" if instant is None else f"{render.age(instant)} ago"


def _line(entry: AuditView) -> Text:
    is_fine = entry.status < 400
    return Text.assemble(
        (render.when(entry.at), "dim"),
        f"  {entry.name} ",
        (f"from {entry.source}  ", "dim"),
        (f"{entry.operation} ", "cyan"),
        f"{entry.path} ",
        (str(entry.status), "green" if is_fine else "red"),
    )


def _seconds(text: str) -> float | None:
    if text == "never":
        return None
    found = re.fullmatch(r"(\d+)([mhdw])", text)
    if found is None:
        fail("Refused", f"--expires is {text!r}; say 30m, 12h, 90d, 4w or never")
        raise typer.Exit(USAGE)
    return float(int(found[1]) * UNITS[found[2]])
