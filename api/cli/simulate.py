"""`everstep simulate`: what goodput a job would have, before an accelerator is rented. Needs no server.

The simulator is a process of its own, because it drives the kernel, which the CLI does not know.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from api.client.errors import ClientError
from api.documents import load_mapping
from orchestrator.domain.errors import Refused

from .session import out, print_json

SHIPPED = Path(__file__).parent / "scenarios"
MEANING = """
p50, p99: of pauses. again: seconds of training that were computed once more.
back: committed steps that were lost. spares: times that one came in.
lost kWh: what was drawn and trained nothing."""
UNREADABLE = 2
"""The simulator's exit status where a bundle is none."""


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A scenario file, or the name of a shipped one.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Draw a chart too; needs matplotlib.")] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", metavar="BUNDLE", help="Not weeks: the incidents of a job, from its bundle.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Of --replay: courses of chance that are tried.")] = 1,
) -> None:
    """Simulate weeks of training with faults: goodput and its losses by cause, under this and other recovery policies.

    Shipped scenarios: llama3-405b, h200-24000, mixed-fleet, spot-fleet. With --replay, what befell a job (everstep bundle
    JOB) befalls a simulated one, and what is decided is checked.
    """
    if (replay is None) == (not scenario):
        raise Refused("simulate takes either a SCENARIO or --replay BUNDLE; see everstep simulate --help")
    if replay is not None:
        _replay(replay, seeds, as_json)
        return
    reports = _run(_read(scenario))
    if as_json:
        print_json({"reports": reports})
    else:
        for part in _tables(reports):
            out().print(part, highlight=False)
        for line in _bars(reports):
            out().print(line, highlight=False)
    if png is not None:
        _draw(reports, png)


def _replay(bundle: Path, seeds: int, as_json: bool) -> None:
    """Raises Refused, ClientError."""
    command = [sys.executable, "-m", "orchestrator.sim", "--replay", str(bundle), "--seeds", str(seeds)]
    done = subprocess.run([*command, *(["--seed", "0", "--trace"] if seeds == 1 else [])], capture_output=True, text=True)
    if done.returncode == UNREADABLE:
        raise Refused(done.stderr.strip())
    told = done.stdout.splitlines()
    if as_json:
        print_json({"passed": done.returncode == 0, "seeds": seeds, "told": told})
    else:
        for line in told:
            out().print(line, highlight=False, markup=False)
    if done.returncode:
        said = done.stderr.strip() or next((line for line in reversed(told) if line.startswith("replay: ")), "")
        raise ClientError(f"the replay did not pass (exit status {done.returncode}); {said}")


def _read(name: str) -> dict[str, Any]:
    path = Path(name) if Path(name).exists() else SHIPPED / f"{name}.yaml"
    try:
        return load_mapping(path.read_text("utf-8"), "application/yaml")
    except (OSError, UnicodeDecodeError) as error:
        shipped = ", ".join(sorted(one.stem for one in SHIPPED.glob("*.yaml")))
        raise Refused(f"{name} cannot be read ({error}); scenarios that come along: {shipped}") from error


def _run(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises Refused, ClientError."""
    command = [sys.executable, "-m", "orchestrator.sim.whatif"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process, Progress(console=Console(stderr=True), transient=True) as progress:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        task = progress.add_task(str(asked.get("name", "simulation")), total=1.0)
        said = []
        for line in process.stderr:
            if line[:1].isdigit():
                progress.update(task, completed=float(line))
            else:
                said.append(line)
        answer = process.stdout.read()
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise ClientError(f"the simulator ended with exit status {process.returncode}: {''.join(said)[-2000:]}") from None
    if "refused" in found:
        raise Refused(str(found["refused"]))
    reports: list[dict[str, Any]] = found["reports"]
    return reports


def _tables(reports: list[dict[str, Any]]) -> Iterator[str | Table]:
    """One for each scenario, below its name; as narrow as a terminal of 80 columns."""
    for name, alike in groupby(reports, key=_name):
        yield f"\n{name}"
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("policy", no_wrap=True)
        for heading in ("goodput", "faults", "p50 s", "p99 s", "again s", "back", "spares", "moved GB", "lost kWh"):
            table.add_column(heading, justify="right", no_wrap=True)
        for one in alike:
            table.add_row(
                one["policy"],
                f"{one['goodput']:.2%}",
                str(one["faults"]),
                f"{one['pause_p50_s']:.2f}",
                f"{one['pause_p99_s']:.2f}",
                f"{one['rerun_s']:,.0f}",
                str(one["rolled_back"]),
                str(one["rungs"].get("spare", 0)) if one["rungs"] else "",
                f"{one['moved_gb']:,.0f}",
                f"{one['energy_lost_kwh']:,}",
            )
        yield table
    yield MEANING


def _name(one: dict[str, Any]) -> str:
    varied = [f"{key} {value}" for key, value in one["scenario"].items() if key not in ("name", "seed")]
    return " ".join([str(one["scenario"]["name"]), *varied])


def _bars(reports: list[dict[str, Any]]) -> list[str]:
    """What is lost of all time, drawn to the worst of them."""
    most = max((1 - one["goodput"] for one in reports), default=0.0) or 1.0
    width = max(len(f"{_name(one)} {one['policy']}") for one in reports)
    bar = max(10, 80 - width - len(" 100.00%, planned maintenance") - 1)
    lines = ["", "lost of all time, and most of it to:"]
    for one in reports:
        lost = max(0.0, 1 - one["goodput"])
        who = f"{_name(one)} {one['policy']}"
        worst = max(_shares(one).items(), key=lambda item: item[1])[0] if lost else ""
        lines.append(f"{who:<{width}} {'█' * max(1, round(bar * lost / most))} {lost:.2%}{worst and f', {worst}'}")
    return lines


def _draw(reports: list[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure  # an extra: a large package for one chart
    except ImportError:
        raise Refused("--png needs matplotlib, which is not installed; run: pip install 'everstep[charts]'") from None
    figure = Figure(figsize=(9, 1.6 + 0.4 * len(reports)), layout="constrained")
    axes = figure.subplots()
    rows = [f"{_name(one)} {one['policy']}" for one in reports]
    starts = [0.0] * len(rows)
    shares = [_shares(one) for one in reports]
    for number, cause in enumerate(sorted({cause for one in shares for cause in one})):
        widths = [100 * one.get(cause, 0.0) for one in shares]
        axes.barh(rows, widths, left=starts, label=cause, color=f"C{number % 10}", hatch="//" if number > 9 else None)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, (start, one) in enumerate(zip(starts, reports, strict=True)):
        axes.text(start, row, f" goodput {one['goodput']:.2%}", va="center", fontsize=8)
    axes.set_xlim(0.0, 1.25 * max(starts))
    axes.set_xlabel("lost of all time, %")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)


def _shares(one: dict[str, Any]) -> dict[str, float]:
    """Of all time, by what it was lost to."""
    found = {cause: seconds / one["seconds"] for cause, seconds in one["lost"].items()}
    lost = max(0.0, 1 - one["goodput"])
    again = min(one["rerun_s"] / one["seconds"], max(0.0, lost - sum(found.values())))
    found["run again"] = again
    if (whole := sum(found.values())) > lost:  # losses that overlap
        found = {cause: share * lost / whole for cause, share in found.items()}
    if (rest := lost - sum(found.values())) > 0:
        found["fewer machines"] = rest
    return found
