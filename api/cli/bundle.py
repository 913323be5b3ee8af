"""`everstep bundle JOB`: everything that somebody else needs to look at what happened to a job, in one .tar.gz.

The format is in docs/bundle.md. What the server tells is taken as it is and blotted where it looks like a secret; nothing
is read from the machine of whoever makes it but the names of its versions.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from platform import platform, python_version
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from api.client import ApiError, Client, EventView, GapView, JobView, calls
from api.redaction import redacted, redacted_text
from api.version import release

from .session import find_job, hint, out, print_json, session_of

FORMAT = "everstep-bundle"
FORMAT_VERSION = 1
LOG_LINES = 1000
PAGE = 1000


def register(app: typer.Typer) -> None:
    app.command()(bundle)


def bundle(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Else JOB.bundle.tar.gz.")] = None,
    log_lines: Annotated[int, typer.Option("--log-lines", min=0, max=10000, help="Of each device's log.")] = LOG_LINES,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Pack a job's record, history, incidents, plans, log tails and versions, without secrets, to hand to somebody."""
    client = session_of(ctx).client()
    found = client.job(find_job(client, job))
    path = output or Path(f"{found.id}.bundle.tar.gz")
    names = write(path, client, found, log_lines, release())
    if as_json:
        print_json({"job": found.id, "path": str(path.resolve()), "bytes": path.stat().st_size, "files": names})
        return
    out().print(f"{path}: {len(names)} files, {path.stat().st_size / 1e3:.0f} kB; look through it before you hand it on")
    hint([f"tar tzf {path}"])


def write(path: Path, client: Client, job: JobView, log_lines: int, version: str) -> list[str]:
    """Names of the files in it. Written beside and renamed, so that a file of this name is a whole one."""
    partial = path.with_name(f"{path.name}.partial")
    names = []
    try:
        with tarfile.open(partial, "w:gz") as archive:
            for name, content in files(client, job, log_lines, version):
                data = content.encode()
                info = tarfile.TarInfo(f"{job.id}/{name}")
                info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                archive.addfile(info, io.BytesIO(data))
                names.append(name)
        partial.chmod(0o600)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return names


def files(client: Client, job: JobView, log_lines: int, version: str) -> Iterator[tuple[str, str]]:
    """Each by its name, the manifest first."""
    yield (
        "manifest.json",
        _json(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "job": job.id,
                "made_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "client": {"version": version, "python": python_version(), "platform": platform()},
                "server": client.send(calls.server()),
            }
        ),
    )
    yield "job.json", _json(job.model_dump(mode="json", exclude={"spec", "incidents"}))
    yield "config.json", json.dumps(_config(job.spec), indent=2, sort_keys=True) + "\n"
    yield "events.jsonl", _lines(history(client, job.id))
    yield "steps.jsonl", _lines(client.all_metrics(job.id))
    yield "incidents.jsonl", _lines(job.incidents)
    yield "faults.jsonl", _lines(client.faults(job.id))
    yield "checkpoints.jsonl", _lines(client.checkpoints(job.id))
    yield "nodes.jsonl", _lines(client.nodes())
    for device in sorted(devices_of(job)):
        try:
            text = client.logs(job.id, device=device, tail=log_lines).text
        except ApiError as error:
            if error.status != 404:
                raise
            continue  # it never wrote one, or its node took it along
        yield f"logs/{device.replace('/', '-')}.log", redacted_text(text)


def history(client: Client, job: str) -> Iterator[EventView | GapView]:
    since = calls.BEGINNING
    while True:
        page = client.history(job, since, PAGE)
        yield from page
        if len(page) < PAGE:
            return
        since = page[-1].id


def devices_of(job: JobView) -> set[str]:
    """Those of its plan, of its incidents and of its failure: each may have a log."""
    found = {seat.device for seat in job.plan.seats} if job.plan else set()
    found |= {device for one in job.incidents for device in one.devices}
    return found | ({job.failure.device} if job.failure and job.failure.device else set())


def _config(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A job file. Its own `secrets` are names, and nothing works without them."""
    shown: dict[str, Any] = redacted({name: value for name, value in spec.items() if name != "secrets"})
    return shown | {"secrets": spec.get("secrets", {})}


def _json(value: Any) -> str:
    return json.dumps(redacted(value), indent=2, sort_keys=True) + "\n"


def _lines(items: Iterable[BaseModel]) -> str:
    return "".join(json.dumps(redacted(item.model_dump(mode="json")), sort_keys=True) + "\n" for item in items)
