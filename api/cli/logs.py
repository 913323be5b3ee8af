"""`everstep logs`: one rank's log as it is, or the lines of many as one, by time and words, past and live."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from api.client import ApiError, Client
from api.views import TERMINAL, LogLineView

from .instants import instant_of
from .jobs import PATIENT_S, AsJson, Job
from .session import DETACHED, JOB_EXIT, OK, find_job, out, print_json, print_json_line, session_of

POLL_S = 0.5
FOLLOWED_TAIL = 10
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def register(app: typer.Typer) -> None:
    app.command()(logs)


def logs(
    ctx: typer.Context,
    job: Job,
    is_followed: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", min=0, help="A rank of the current generation; several are merged.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", help="node/index, whatever rank sits there; several are merged.")
    ] = None,
    is_merged: Annotated[bool, typer.Option("--all", "-a", help="Every rank's lines as one, by time.")] = False,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only later lines: 10m, 2h, or 2026-05-01T12:00:00Z.")
    ] = None,
    grep: Annotated[str, typer.Option("--grep", "-g", metavar="TEXT", help="Only lines that hold this text.")] = "",
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, max=10000, help="Only the last lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """A log: of the rank that failed, else the first; or lines of many, merged and searched."""
    client = session_of(ctx).client(PATIENT_S if is_followed else 2.0)
    job_id = find_job(client, job)
    named = [*(rank or ()), *(device or ())]
    if is_merged or since is not None or grep or len(named) > 1:
        start = None if since is None else instant_of(since, datetime.now(UTC))
        wanted = _Wanted(tuple(rank or ()), tuple(device or ()), start, grep, tail)
        raise typer.Exit(_show_lines(client, job_id, wanted, is_followed, as_json))
    which: dict[str, Any] = {"rank": rank[0] if rank else None, "device": device[0] if device else None}
    if is_followed:
        raise typer.Exit(_follow(client, job_id, which, FOLLOWED_TAIL if tail is None else tail))
    chunk = client.logs(job_id, tail=tail, **which)
    if as_json:
        print_json({"job": job_id, "device": chunk.device, "text": chunk.text, "next_offset": chunk.next_offset})
    else:
        typer.echo(chunk.text, nl=False)


# --- one log, byte for byte ----------------------------------------------------------------------------------------------


def _follow(client: Client, job_id: str, which: dict[str, Any], tail: int) -> int:
    offset: int | None = None
    try:
        while True:
            status = client.job(job_id).status
            try:
                if offset is None:
                    chunk = client.logs(job_id, tail=tail, **which)
                else:
                    chunk = client.logs(job_id, offset=offset, **which)
            except ApiError as error:
                # Not there yet: its rank has still to start.
                if error.status != 404 or status in TERMINAL:
                    raise
            else:
                # A rank's number may move to another device; this log stays with the device it began on.
                which, offset = {"device": chunk.device}, chunk.next_offset
                typer.echo(chunk.text, nl=False)
                if chunk.text:
                    continue
            if status in TERMINAL:
                return JOB_EXIT[status]
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return DETACHED


# --- lines of many -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    since: datetime | None
    grep: str
    tail: int | None


def _show_lines(client: Client, job_id: str, wanted: _Wanted, is_followed: bool, as_json: bool) -> int:
    """Its exit status."""
    console, after, tail = out(), "", wanted.tail
    try:
        while True:
            status = client.job(job_id).status if is_followed else ""
            page = client.log_lines(
                job_id,
                ranks=wanted.ranks,
                devices=wanted.devices,
                since=wanted.since,
                grep=wanted.grep,
                tail=tail,
                after=after,
            )
            for line in page.lines:
                if as_json:
                    print_json_line(line)
                else:
                    _print(console, line)
            is_cut = page.is_cut and tail is None  # what stands before a tail was not asked for
            after, tail = page.next, None
            if is_cut:
                continue
            if not is_followed or status in TERMINAL:
                return JOB_EXIT[status] if is_followed else OK
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return DETACHED


def _print(console: Console, line: LogLineView) -> None:
    who = f"rank {line.rank}" if line.rank is not None else line.device
    colour = _COLOURS[(line.rank if line.rank is not None else len(line.device)) % len(_COLOURS)]
    shown = Text.assemble((f"{line.at.astimezone():%H:%M:%S} ", "dim"), (f"{who:<8} ", colour))
    console.print(shown.append_text(Text.from_ansi(line.text)), soft_wrap=True)
