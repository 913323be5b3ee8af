"""`everstep adopt`: a job that the server no longer knows, taken up again from what lies beside its checkpoints."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import typer
from rich.text import Text

from api.client import ApiError, Client
from api.job_files import job_file
from orchestrator.domain import codec
from orchestrator.domain.errors import Refused
from orchestrator.domain.spec import JobSpec

from .checkpoints import AsJson, AtStep, run
from .session import hint, out, print_json, session_of

LABEL = "adopted-from"


def register(app: typer.Typer) -> None:
    app.command()(adopt)


def adopt(
    ctx: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A job's folder, or that of its checkpoints.")],
    step: AtStep = None,
    is_trusted: Annotated[bool, typer.Option("--trust", help="Read neither the checkpoint nor the text first.")] = False,
    key: Annotated[str | None, typer.Option(help="Idempotency key; else one checkpoint makes one job a day.")] = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a job that the server has lost, from its checkpoints alone: the newest that is good in every byte."""
    arguments = ["show", folder, *([] if step is None else ["--step", str(step)]), *([] if is_trusted else ["--checked"])]
    found = run(arguments, () if is_trusted else ("torch", "numpy"), "checking")
    client = session_of(ctx).client()
    require_unknown(client, found["job"])
    submitted = client.submit(body_of(found), key or key_of(found))
    if as_json:
        print_json({**submitted.model_dump(mode="json"), "adopted_from": found["job"], "step": found["step"]})
        return
    for one in found["passed_over"]:
        out().print(Text(f"passed over: {one}", "yellow"), soft_wrap=True)
    said = f" goes on with {found['job']} after step {found['step']}"
    out().print(Text.assemble(("✓ ", "green"), (submitted.id, "bold"), said), soft_wrap=True)
    hint([f"everstep events -f {submitted.id}", f"everstep get {submitted.id}"])


def body_of(found: dict[str, Any]) -> dict[str, Any]:
    """The job file of the same mathematics that begins where the checkpoint is."""
    body = job_file(codec.decode(JobSpec, found["spec"]))
    body["checkpoint"] = {**body["checkpoint"], "restore_from": found["path"], "weights_only": False}
    # The first name stays, however often a job is adopted.
    body["labels"] = {LABEL: found["job"], **body["labels"]}
    return body


def require_unknown(client: Client, job: str) -> None:
    """Two jobs must not go on with the same one. Raises Refused."""
    try:
        known = client.job(job)
    except ApiError as error:
        if error.status != 404:
            raise
        return
    if not known.is_over:
        raise Refused(f"the server knows {job}, which is {known.status}; cancel it first, or leave it to go on")


def key_of(found: dict[str, Any]) -> str:
    marks = f"{found['path']} {found['step']} {found['generation']}"
    return f"adopt-{hashlib.sha256(marks.encode()).hexdigest()[:32]}"
