"""Commands about webhooks: whom to tell over HTTP of what happens, and what became of each message."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from api.hook_shapes import DeliveryView, WebhookView
from orchestrator.domain.hooks import Occasion

from . import render
from .cluster import AsJson
from .jobs import labels_of
from .session import hint, out, print_json, session_of

Webhook = Annotated[str, typer.Argument(metavar="ID", help="See everstep webhook ls.")]
STYLES = {"delivered": "green", "failed": "red", "pending": "yellow"}


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Have URLs told of what happens to jobs and nodes, signed.")
    for name, command in (
        ("create", create),
        ("ls", list_webhooks),
        ("rm", remove),
        ("test", test),
        ("pause", pause),
        ("resume", resume),
        ("log", log),
        ("redeliver", redeliver),
    ):
        group.command(name)(command)
    app.add_typer(group, name="webhook")


def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="https://...")],
    event: Annotated[
        list[Occasion] | None, typer.Option("--event", "-e", help="Only of this; repeatable; of all where none is given.")
    ] = None,
    project: Annotated[list[str] | None, typer.Option("--project", "-p", help="Only jobs of this one; repeatable.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Only jobs that carry it; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a webhook and show what its messages are signed with, this once."""
    events = [one.value for one in event or ()]
    made = (
        session_of(ctx).client().create_webhook(name, url, events=events, projects=project or (), labels=labels_of(label))
    )
    if as_json:
        print_json(made)
        return
    out().print(made.secret, soft_wrap=True)
    out().print(Text(f"{made.id} is told of {_events(made)}; its secret is not shown again", "dim"))
    hint([f"everstep webhook test {made.id}", f"everstep webhook log {made.id}", f"everstep webhook rm {made.id}"])


def list_webhooks(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List webhooks, with how each fares."""
    found = session_of(ctx).client().webhooks()
    if as_json:
        print_json(found)
    elif not found:
        out().print("no webhooks")
        hint(["everstep webhook create NAME https://... --event job.failed"])
    else:
        out().print(_table(found))
        for one in found:
            if one.why:
                out().print(f"  {one.id} is paused: {one.why}", style="yellow", soft_wrap=True)


def remove(ctx: typer.Context, webhook: Webhook, as_json: AsJson = False) -> None:
    """Remove a webhook, its secret and what it was to be told."""
    session_of(ctx).client().delete_webhook(webhook)
    if as_json:
        print_json({"id": webhook, "removed": True})
    else:
        out().print(f"{webhook} is gone")


def test(ctx: typer.Context, webhook: Webhook, as_json: AsJson = False) -> None:
    """Send it a ping."""
    made = session_of(ctx).client().test_webhook(webhook)
    if as_json:
        print_json(made)
        return
    out().print(f"{made.id} is on its way")
    hint([f"everstep webhook log {webhook}"])


def pause(ctx: typer.Context, webhook: Webhook, as_json: AsJson = False) -> None:
    """Have it told nothing until it is resumed."""
    _said(session_of(ctx).client().pause_webhook(webhook), as_json)


def resume(ctx: typer.Context, webhook: Webhook, as_json: AsJson = False) -> None:
    """Have a paused one told again, at first what was pending."""
    _said(session_of(ctx).client().resume_webhook(webhook), as_json)


def log(
    ctx: typer.Context,
    webhook: Webhook,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show what it was told or is to be told, newest first."""
    found = session_of(ctx).client().deliveries(webhook)[:limit]
    if as_json:
        print_json(found)
        return
    for one in found:
        out().print(_line(one), soft_wrap=True)
    if not found:
        out().print("nothing yet")
        hint([f"everstep webhook test {webhook}"])


def redeliver(
    ctx: typer.Context,
    webhook: Webhook,
    delivery: Annotated[str, typer.Argument(metavar="MESSAGE", help="See everstep webhook log.")],
    as_json: AsJson = False,
) -> None:
    """Send a message once more, under the same id."""
    made = session_of(ctx).client().redeliver(webhook, delivery)
    if as_json:
        print_json(made)
    else:
        out().print(f"{made.id} is on its way again")


def _said(one: WebhookView, as_json: bool) -> None:
    if as_json:
        print_json(one)
    else:
        out().print(f"{one.id} is {one.status}")


def _events(one: WebhookView) -> str:
    return ", ".join(one.events) or "everything"


def _table(found: list[WebhookView]) -> object:
    words = {"id", "name", "status", "told of"}
    table = render.table_of("id", "name", "status", "told of", "delivered", words=words, folds="told of")
    for one in found:
        whose = [*(f"project {name}" for name in one.projects), *(f"{name}={value}" for name, value in one.labels.items())]
        last = "never" if one.last_delivered_at is None else f"{render.age(one.last_delivered_at)} ago"
        fares = f"{one.status}, {one.failures} given up" if one.failures else one.status
        told = _events(one) + (f" of {', '.join(whose)}" if whose else "")
        table.add_row(one.id, one.name, fares, told, last)
    return table


def _line(one: DeliveryView) -> Text:
    last = one.attempts[-1] if one.attempts else None
    said = "" if last is None else f" {last.error or last.code} in {last.seconds:.2f} s"
    again = "" if one.next_try_at is None or not one.tries else f", again at {render.when(one.next_try_at)}"
    return Text.assemble(
        (render.when(one.at), "dim"),
        f"  {one.id}  {one.event}  ",
        (one.status, STYLES[one.status]),
        f" try {one.tries}{said}{again}",
    )
