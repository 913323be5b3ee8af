"""`everstep ckpt`: a job's checkpoints, and what can be done with them on the disk they are on.

What reads tensors runs in a process of its own, which tells how far it is: this one never loads torch, and says in a
sentence what is missing where only the client is installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from api.client.client import Client
from api.client.errors import ApiError, ClientError, Unreachable
from orchestrator.domain.errors import Refused

from . import checkpoint_tables as tables
from . import render
from .session import BAD, USAGE, fail, find_job, hint, out, print_json, session_of

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Where = Annotated[
    str, typer.Argument(metavar="PATH|JOB", help="A checkpoint's folder, a job's, or a job by id, name or `last`.")
]
Job = Annotated[str, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")]
AtStep = Annotated[int | None, typer.Option("--step", min=0, help="Of this step; else the newest good one.")]
READERS = ("torch", "numpy")
POLL_S = 0.2


class Dtype(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"


def register(app: typer.Typer) -> None:
    ckpt = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, compare them, take them elsewhere.")
    for name, command in (("ls", ls), ("now", now), ("verify", verify), ("export", export), ("diff", diff), ("gc", gc)):
        ckpt.command(name)(command)
    app.add_typer(ckpt, name="ckpt")


def ls(ctx: typer.Context, job: Job, as_json: AsJson = False) -> None:
    """List a job's checkpoints, newest first."""
    client = session_of(ctx).client()
    job_id = find_job(client, job)
    found = client.checkpoints(job_id)
    if as_json:
        print_json(found)
    elif not found:
        out().print(f"{job_id} has no checkpoint yet")
    else:
        out().print(tables.checkpoints(found))
        hint([f"everstep ckpt verify {job_id}", f"everstep ckpt export {job_id} FOLDER"])


def now(
    ctx: typer.Context,
    job: Job,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when it is durable; exit status 3 if it comes to nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Have a checkpoint made of a running job's next step."""
    client = session_of(ctx).client()
    job_id = find_job(client, job)
    before = {one.path for one in client.checkpoints(job_id)} if wait else set()
    accepted = client.checkpoint_now(job_id)
    if wait:
        _show_made(client, job_id, before, as_json)
    elif as_json:
        print_json(accepted)
    else:
        out().print(accepted.message)
        hint([f"everstep ckpt ls {job_id}"])


def _show_made(client: Client, job: str, before: set[str], as_json: bool) -> None:
    began = time.monotonic()
    with Console(stderr=True).status("asked for") as status:
        while True:
            view = client.job(job)  # first: what it has made by its end is listed after that
            made = [one for one in client.checkpoints(job) if one.path not in before]
            if made or view.is_over:
                break
            saving = render.copies([one for one in view.copies if one.what == "saving"])
            far = f"; {'; '.join(saving)}" if saving else ""
            status.update(
                f"step {view.step} of {view.steps}, waiting for it to be durable, {time.monotonic() - began:.0f} s{far}"
            )
            time.sleep(POLL_S)
    if not made:
        fail("Not saved", f"{job} is over ({view.status}) and has made no checkpoint since", [])
        raise typer.Exit(BAD)
    if as_json:
        print_json(made[0])
    else:
        out().print(tables.checkpoints(made[:1]))


def verify(
    ctx: typer.Context,
    path: Where,
    step: AtStep = None,
    is_all: Annotated[bool, typer.Option("--all", help="All that are there, not the newest alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and check it; exit status 3 where one is not what was written.

    Of a job that is the newest that can be used; newer ones that cannot be are named as damaged.
    """
    result = run(["verify", place(ctx, path), *_step(step), *(["--all"] if is_all else [])], READERS, "checking")
    damaged = [one for one in (*result["others"], result) if one["bad"]]
    if as_json:
        print_json(result)
    else:
        for one in damaged:
            fail("Damaged", f"{one['path']} is not what was written", one["bad"])
        if not result["bad"]:
            said = f"{result['lines']} parameters, {render.size(result['bytes'])}, every byte as it was written"
            out().print(f"[green]✓[/] step {result['step']}: {said}")
        if whole := sum(not one["bad"] for one in result["others"]):
            out().print(f"[green]✓[/] so are {whole} others")
        if damaged:
            hint([f"everstep ckpt gc {path}", f"everstep ckpt ls {path}"], on_stderr=True)
    raise typer.Exit(BAD if damaged else 0)


def export(
    ctx: typer.Context,
    path: Where,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is not there yet.")],
    step: AtStep = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.FP32,
    file_mb: Annotated[int, typer.Option(min=1, help="MB of weights in one file; as much is in memory.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's model in Hugging Face's layout: config.json and safetensors, for transformers to load."""
    arguments = ["export", place(ctx, path), str(folder), *_step(step), "--dtype", dtype.value]
    result = run([*arguments, "--file-bytes", str(file_mb * 1_000_000)], (*READERS, "safetensors"), "exporting")
    if as_json:
        print_json(result)
        return
    files = "1 file" if result["files"] == 1 else f"{result['files']} files"
    said = f"step {result['step']}: {result['tensors']} tensors, {render.size(result['bytes'])} of {dtype.value} in {files}"
    out().print(Text.assemble(("✓ ", "green"), (result["path"], "bold"), f"  {said}"), soft_wrap=True)
    hint([f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{result['path']}')\""])


def diff(
    ctx: typer.Context,
    a: Where,
    b: Annotated[str, typer.Argument(metavar="PATH|JOB", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints element by element, whatever plans wrote them; exit status 3 where they differ."""
    result = run(["diff", place(ctx, a), place(ctx, b)], READERS, "comparing")
    differs = bool(result["unlike"] or result["only_a"] or result["only_b"])
    if as_json:
        print_json(result)
    elif differs:
        out().print(tables.difference(result))
    else:
        out().print(f"[green]✓[/] {result['same_lines']} parameters and their moments are alike in every bit")
    raise typer.Exit(BAD if differs else 0)


def gc(
    ctx: typer.Context,
    path: Where,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Checkpoints to keep.")] = 2,
    is_meant: Annotated[bool, typer.Option("--remove", help="Remove them; otherwise nothing is changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what nobody needs any more of a job's checkpoints, or remove it. Never the newest good one."""
    folder = place(ctx, path)
    if is_meant:
        _require_own(ctx, path, folder)
        _require_over(ctx, folder)
    arguments = ["gc", folder, "--keep-last", str(keep_last), *(["--remove"] if is_meant else [])]
    result = run(arguments, (), "looking")
    if as_json:
        print_json(result)
        return
    out().print(tables.going(result))
    if result["going"] and not result["removed"]:
        hint([f"everstep ckpt gc {path} --keep-last {keep_last} --remove"])


# --- in a process of its own ---------------------------------------------------------------------------------------------


def place(ctx: typer.Context, reference: str) -> str:
    """The folder that is meant: of this name, or of this job's newest checkpoint's siblings."""
    if "://" in reference:
        return reference
    if _is_path(reference):
        return str(Path(reference).expanduser().absolute())
    client = session_of(ctx).client()
    job = client.job(find_job(client, reference))
    if job.checkpoint is None:
        raise ClientError(f"{job.id} has no checkpoint yet; see everstep get {job.id}")
    return job.checkpoint.path.rpartition("/")[0]


def _is_path(reference: str) -> bool:
    return "/" in reference or Path(reference).exists()


def run(arguments: Sequence[str], needs: Sequence[str], doing: str) -> dict[str, Any]:
    """Its result. Ends the command where something is missing or it was refused."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        fail("Not installed", f"{arguments[0]} needs {', '.join(missing)}; run: pip install 'everstep[worker]'")
        raise typer.Exit(USAGE)
    command = [sys.executable, "-m", "deploy.checkpoints", *arguments]
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    result: dict[str, Any] | None = None
    refused = ""
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        task = None
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            if "total" in said:
                task = progress.add_task(doing, total=said["total"]) if task is None else task
                progress.update(task, completed=said["done"])
            result, refused = said.get("result", result), said.get("refused", refused)
    if result is None:
        raise ClientError(refused or f"{arguments[0]} ended with exit status {process.returncode}; see what it said above")
    return result


def _require_own(ctx: typer.Context, reference: str, folder: str) -> None:
    """What a job began with is another one's. Raises Refused."""
    if _is_path(reference):
        return
    job = find_job(session_of(ctx).client(), reference)
    if job not in folder.split("/"):
        raise Refused(f"{job} has no checkpoint of its own yet, only what it began with; name {folder} if that is meant")


def _require_over(ctx: typer.Context, folder: str) -> None:
    """What a job that trains has written and not committed yet looks like what nobody needs. Raises Refused."""
    named = next((part for part in reversed(folder.split("/")) if part.startswith("job-")), None)
    if named is None:
        return
    try:
        client = session_of(ctx).client(retry_s=0)
    except Unreachable:
        return  # there is no server here
    try:
        found = client.job(named)
    except ApiError as error:
        if error.status == 404:
            return  # nobody knows it, so nobody writes for it
        raise
    except Unreachable as error:
        said = f"whether {named} is over cannot be asked ({error}), and nothing is removed of a job that trains"
        raise Refused(f"{said}; start the server again, or name a --state-dir without one") from error
    if not found.is_over:
        raise Refused(f"{named} is {found.status} and removes by itself what it does not keep; wait until it is over")


def _step(step: int | None) -> list[str]:
    return [] if step is None else ["--step", str(step)]
