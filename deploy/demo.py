"""`make demo`: the main job from nothing to its end, with a node killed a third of the way in and one added back.

Brings up a cluster, submits the example through the API, watches it, does the damage, and compares every step's loss with
an undisturbed single-process run. The last line of output is one JSON object; the exit status is 0 only if the job
succeeded, recovered at least once and the largest gap is within MAX_GAP.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from api.cli.follow import follow
from api.client import Client
from api.schemas import load_job_file
from api.views import JobView, StepView
from deploy.local import LocalCluster, NodeSpec, up
from orchestrator.domain import codec
from orchestrator.domain.spec import JobSpec
from worker.confinement import may_show_views
from worker.lodging import VARIABLES

EXAMPLE = Path(__file__).resolve().parent.parent / "worker" / "examples" / "byte-gpt.yaml"
NODES = (NodeSpec("A100", 2), NodeSpec("A100", 2), NodeSpec("H100", 2), NodeSpec("B200", 2))
MAX_GAP = 1e-4
STEPS_BEFORE_RETURN = 12
"""Committed after the recovery before a node is added back, so that the smaller cluster can be seen to train."""


@dataclass(slots=True)
class Saboteur:
    """Kills the node of rank 0 a third of the way in, and adds one of its kind back once training goes on."""

    client: Client
    console: Console
    job: str
    steps: int
    victim: str | None = None
    kind: str = ""
    killed_in: int = 0
    resumed_at: int | None = None
    returned: bool = field(default=False)

    def __call__(self, step: StepView) -> None:
        if self.victim is None:
            if step.step >= self.steps // 3:
                self._kill(step)
        elif self.resumed_at is None:
            if step.generation > self.killed_in:
                self.resumed_at = step.step
        elif not self.returned and step.step >= self.resumed_at + STEPS_BEFORE_RETURN:
            self.client.add_node(self.kind, 2)
            self.returned = True
            self.console.print(f"[bold green]a {self.kind} node with 2 devices is added[/] after step {step.step}")

    def _kill(self, step: StepView) -> None:
        plan = self.client.job(self.job).plan
        if plan is None:
            return
        self.victim = plan.seats[0].device.rpartition("/")[0]
        self.kind = next(node.kind for node in self.client.nodes() if node.id == self.victim)
        self.killed_in = step.generation
        self.console.print(f"[bold red]{self.victim} is killed[/], every process of it, after step {step.step}")
        self.client.kill_node(self.victim)


def main() -> int:
    console = Console(stderr=False)
    spec = load_job_file(EXAMPLE.read_text("utf-8"), "application/yaml")
    console.print(f"[bold]Everstep demo[/]: {spec.name}, {spec.train.steps} steps on {len(NODES)} emulated nodes")
    if os.geteuid() == 0 and not may_show_views():
        os.environ[f"{VARIABLES}USER"] = "service"
        console.print("[yellow]root has no right to mount here, so the job runs as root, too: jobs.user is service[/]")
    with tempfile.TemporaryDirectory(prefix="everstep-demo-", ignore_cleanup_errors=True) as state_dir:
        cluster = up(Path(state_dir), NODES, chaos=True, say=lambda line: console.print(f"[dim]{line}[/]"))
        try:
            job, losses = _train(cluster, console, spec)
        finally:
            console.print("[dim]stopping everything this demo started[/]")
            cluster.down()
    gaps = _gaps(losses, _reference(spec, console))
    _show(console, job, losses, gaps)
    print(json.dumps(_summary(job, losses, gaps)), flush=True)
    recovered = any(not incident.is_resize for incident in job.incidents)
    complete = len(gaps) == spec.train.steps
    return 0 if job.status == "SUCCEEDED" and recovered and complete and max(gaps, default=1.0) <= MAX_GAP else 1


def _train(cluster: LocalCluster, console: Console, spec: JobSpec) -> tuple[JobView, dict[int, float]]:
    """The finished job and the loss of every step, as committed last."""
    with Client(cluster.url) as client:
        submitted = client.submit(EXAMPLE)
        console.print(f"POST /api/v1/jobs -> [bold]{submitted.id}[/]")
        saboteur = Saboteur(client=client, console=console, job=submitted.id, steps=spec.train.steps)
        job = follow(client, submitted.id, console, on_step=saboteur)
        losses = {step.step: step.loss for step in client.all_metrics(submitted.id) if step.loss is not None}
    return job, losses


def _reference(spec: JobSpec, console: Console) -> Sequence[float]:
    """Losses of the undisturbed run, cached by what the job computes; always computed anew in CI."""
    encoded = codec.dumps(spec)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "everstep"
    cached = cache / f"reference-{hashlib.sha256(encoded).hexdigest()[:16]}.json"
    if cached.exists() and not os.environ.get("CI"):
        console.print("[dim]the undisturbed single-process run is cached[/]")
        return _losses_of(cached.read_text())
    console.print("[dim]running the same job undisturbed in a single process[/]")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(encoded)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "worker.reference", file.name], stdout=subprocess.PIPE, text=True, check=True
        )
    cache.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(f".{os.getpid()}")
    partial.write_text(done.stdout)
    partial.replace(cached)
    return _losses_of(done.stdout)


def _losses_of(reference: str) -> Sequence[float]:
    losses: Sequence[float] = json.loads(reference)["losses"]
    return losses


def _gaps(losses: dict[int, float], reference: Sequence[float]) -> list[float]:
    return [abs(losses[step] - loss) for step, loss in enumerate(reference, start=1) if step in losses]


def _show(console: Console, job: JobView, losses: dict[int, float], gaps: list[float]) -> None:
    table = Table(title="what happened", title_justify="left")
    for column in ("generation", "cause", "pause", "steps run again", "state from"):
        table.add_column(column)
    for incident in job.incidents:
        pause = f"{incident.pause_s:.3f} s" if incident.pause_s is not None else "not measured"
        ended = f"{incident.generation} -> {incident.next_generation}"
        table.add_row(ended, incident.cause, pause, str(incident.rolled_back), incident.source)
    console.print(table)
    if gaps and losses:
        console.print(
            f"loss {losses[min(losses)]:.4f} -> {losses[max(losses)]:.4f}; "
            f"largest gap to the undisturbed run over {len(gaps)} steps: {max(gaps):.2e} (allowed {MAX_GAP:.0e})"
        )


def _summary(job: JobView, losses: dict[int, float], gaps: list[float]) -> dict[str, object]:
    return {
        "state": job.status,
        "steps": job.step,
        "generations": job.generation,
        "recoveries": [{"cause": incident.cause, "pause_s": incident.pause_s} for incident in job.incidents],
        "loss_first": losses.get(min(losses, default=0)),
        "loss_last": losses.get(max(losses, default=0)),
        "max_loss_gap": max(gaps) if gaps else None,
    }


if __name__ == "__main__":
    sys.exit(main())
