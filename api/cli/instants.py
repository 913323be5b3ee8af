"""Instants as people give them on the command line: so long ago, or by the calendar."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta

import typer

TIMES = "10m, 2h, 1d ago, or 2026-05-01T12:00:00Z"
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def instant_of(text: str, now: datetime, option: str = "--since") -> datetime:
    """`10m` before now, or an RFC 3339 instant. Raises typer.BadParameter, naming the option."""
    if ago := _AGO.fullmatch(text):
        with suppress(OverflowError):
            return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{option} is {text!r}, must be like 30s, 10m, 2h, 1d or 2026-05-01T12:00:00Z") from None
    return found if found.tzinfo else found.astimezone()
