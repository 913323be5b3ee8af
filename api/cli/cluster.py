"""Commands about the cluster: nodes, faults on purpose, and the local server's life."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from api.views import AcceptedView

from . import render
from .session import USAGE, fail, find_job, hint, out, print_json, session_of

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Overrides the one given before the command.")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="List the cluster's nodes, add some, empty them, take them away.")
    group.callback(invoke_without_command=True)(nodes)
    group.command("add")(add)
    group.command("cordon")(cordon)
    group.command("uncordon")(uncordon)
    group.command("drain")(drain)
    group.command("rm")(remove)
    group.command("release")(release)
    app.add_typer(group, name="nodes")
    kill = typer.Typer(
        no_args_is_help=True, help="Kill a rank or a node for real, to see a recovery (needs a server with chaos on)."
    )
    kill.command("node")(kill_node)
    kill.command("rank")(kill_rank)
    app.add_typer(kill, name="kill")
    app.command("up", context_settings=PASS_ON)(up)
    app.command("down", context_settings=PASS_ON)(down)
    app.command("join", context_settings={**PASS_ON, "help_option_names": []})(join)


NodeName = Annotated[str, typer.Argument(metavar="NODE", help="See everstep nodes.")]


def nodes(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the cluster's nodes, add some, keep work off them, empty them, take them away."""
    if ctx.invoked_subcommand:
        return
    found = session_of(ctx).client().nodes()
    if as_json:
        print_json(found)
    elif not found:
        out().print("no nodes")
        hint(["everstep nodes add H100"])
    else:
        out().print(render.nodes_table(found))
        for line in render.kept_out(found):
            out().print(line)
        held = [
            node.id
            for node in found
            if any(one.standing == "held" for one in node.quarantine) or node.admission == "refused"
        ]
        if held:
            hint([f"everstep nodes release {name}" for name in held])


def add(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="A100, H100, H200, B200 or cpu.")],
    num_devices: Annotated[int, typer.Option("--devices", "-d", min=1, max=64)] = 2,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=64, help="Nodes of this kind.")] = 1,
    rack: Annotated[str | None, typer.Option(help="Its failure domain; mirrors keep out of their owner's.")] = None,
    switch: Annotated[str | None, typer.Option(help="Its failure domain where no rack is given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Add nodes; running jobs move onto them while they train."""
    labels = {name: value for name, value in (("rack", rack), ("switch", switch)) if value}
    accepted = session_of(ctx).client().add_node(kind, num_devices, labels, count=count)
    _show(accepted, as_json, "everstep nodes")


def cordon(ctx: typer.Context, name: NodeName, as_json: AsJson = False) -> None:
    """Place nothing new on a node; what trains there trains on."""
    _show(session_of(ctx).client().cordon_node(name), as_json, f"everstep nodes drain {name}")


def uncordon(ctx: typer.Context, name: NodeName, as_json: AsJson = False) -> None:
    """Let a node be used again; jobs that have not left it yet need not."""
    _show(session_of(ctx).client().uncordon_node(name), as_json, "everstep nodes")


def drain(ctx: typer.Context, name: NodeName, as_json: AsJson = False) -> None:
    """Have jobs move off a node while they train; the node stays, and stays empty."""
    _show(session_of(ctx).client().drain_node(name), as_json, "everstep nodes", f"everstep nodes rm {name}")


def remove(
    ctx: typer.Context,
    name: NodeName,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", min=0, metavar="SECONDS", help="It goes then in any case.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Drain a node, then take it away."""
    _show(session_of(ctx).client().remove_node(name, deadline_s), as_json, "everstep nodes")


def release(ctx: typer.Context, name: NodeName, as_json: AsJson = False) -> None:
    """Let a node's devices be used again that are kept out for wrong numbers; you vouch for them."""
    _show(session_of(ctx).client().release_node(name), as_json, "everstep nodes")


def kill_node(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="See everstep nodes.")],
    as_json: AsJson = False,
) -> None:
    """End every process of a node at once."""
    accepted = session_of(ctx).client().kill_node(name)
    _show(accepted, as_json, "everstep events -f last", "everstep nodes")


def kill_rank(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="An id, a name, or `last`.")],
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="Of the current generation.")],
    as_json: AsJson = False,
) -> None:
    """Kill one training process of a job."""
    client = session_of(ctx).client()
    job_id = find_job(client, job)
    accepted = client.kill_rank(job_id, rank)
    _show(accepted, as_json, f"everstep get {job_id}")


def _show(accepted: AcceptedView, as_json: bool, *next_commands: str) -> None:
    if as_json:
        print_json(accepted)
    else:
        out().print(accepted.message)
        hint(list(next_commands))


def up(ctx: typer.Context, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Start the local cluster: Redis, Ray with emulated nodes, supervisor, API. Further options are passed on to it."""
    raise typer.Exit(_local(ctx, "up", state_dir, as_json))


def down(ctx: typer.Context, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Stop what `everstep up` started, and nothing else."""
    raise typer.Exit(_local(ctx, "down", state_dir, as_json))


def join(ctx: typer.Context) -> None:
    """Bring this machine to a cluster as a node, and stay until it has left: `everstep join HOST:PORT --token-file F`."""
    # This very process: whoever stops it means the node, which is emptied first.
    os.execv(sys.executable, [sys.executable, "-m", "deploy.join", *ctx.args])


def _local(ctx: typer.Context, action: str, state_dir: Path | None, as_json: bool) -> int:
    # In a process of its own: this one never loads Ray.
    missing = [name for name in ("ray", "redis", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        fail("Not installed", f"the server needs {', '.join(missing)}; run: pip install 'everstep[server,worker]'")
        return USAGE
    directory = (state_dir or session_of(ctx).state_dir).expanduser()
    shown = ["--json"] if as_json else []
    command = [sys.executable, "-m", "deploy.local", action, "--state-dir", str(directory), *shown, *ctx.args]
    code = subprocess.call(command)
    if code == 0 and action == "up" and not as_json:
        hint(["everstep nodes", "everstep submit FILE --follow", "everstep down"])
    return code
