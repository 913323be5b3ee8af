"""How a forecast looks in a terminal. Takes what the API or a planning process says, prints nothing itself."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from api.plan_views import ForecastView, PlanRowView

from .render import table_of

CAUSES = {
    "compute": "computing",
    "tp": "tensor-parallel collectives",
    "bubble": "waiting in the pipeline",
    "p2p": "activations to neighbours",
    "dp": "reduction over replicas",
    "optimizer": "the update",
}
MAX_ROWS = 24


def forecast(found: ForecastView) -> RenderableType:
    parts: list[RenderableType] = [
        Text.assemble(
            (found.shape, "bold"),
            f"  {found.devices:,} {'device' if found.devices == 1 else 'devices'}",
            f", {found.idle:,} idle" if found.idle else "",
        ),
        Text(found.reason),
        "",
        _by_node(found),
    ]
    if len(found.rows) > MAX_ROWS:
        parts.append(Text(f"  {len(found.rows) - MAX_ROWS} more rows with --json", "dim"))
    parts += ["", _by_cause(found)]
    if found.alternatives:
        parts += ["", _others(found)]
    parts += ["", Text(f"survives: {found.survival}")]
    parts += [Text(f"faster: {words}", "cyan") for words in found.advice]
    return Group(*parts)


def _by_node(found: ForecastView) -> RenderableType:
    table = table_of("NODES", "KIND", "USED", "MEMORY", "WORK", words=("KIND", "WORK"))
    table.columns[-1].overflow = "fold"
    table.columns[-1].no_wrap = False
    for row in found.rows[:MAX_ROWS]:
        names = row.first if row.first == row.last else f"{row.first} .. {row.last}"
        work = Text("\n".join(row.work))
        work.append(f"\n{names}", "dim")
        table.add_row(f"{row.nodes:,}", Text(row.kind), f"{row.used}/{row.devices}", _memory(row), work)
    return table


def _memory(row: PlanRowView) -> str:
    limit = row.memory_limit_bytes / 2**30
    return f"{row.memory_bytes / 2**30:.1f}/{limit:.0f} GiB" if row.used else "–"


def _by_cause(found: ForecastView) -> RenderableType:
    table = table_of("SECONDS", "SHARE", "A STEP'S TIME", words=("A STEP'S TIME",))
    total = found.step_s or 1.0
    for name, seconds in found.causes.items():
        table.add_row(_seconds(seconds), f"{seconds / total:.1%}", CAUSES.get(name, name))
    bound = f"all; no plan on these devices takes less than {found.bound_s:.4g} s"
    table.add_row(Text(_seconds(total), "bold"), f"{found.share_of_bound or 0.0:.0%} of bound", bound)
    return table


def _seconds(seconds: float) -> str:
    """Four figures; nothing is said to the last of what is too little to matter."""
    return f"{seconds:.4g}" if seconds >= 1e-3 or not seconds else f"{seconds:.6f}"


def _others(found: ForecastView) -> RenderableType:
    table = table_of("SECONDS", "ALSO TRIED", "LOST BY", words=("ALSO TRIED", "LOST BY"))
    for column in table.columns[1:]:
        column.overflow = "fold"
        column.no_wrap = False
    for one in found.alternatives:
        table.add_row("–" if one.step_s is None else _seconds(one.step_s), Text(one.shape), Text(one.why))
    return table
