"""How checkpoints look in a terminal. Takes what the API or a process that reads them says, prints nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from api.views import CheckpointView

from .render import age, seconds, size, table_of


def checkpoints(found: Sequence[CheckpointView]) -> RenderableType:
    numbers = ("STEP", "GEN.", "NEW", "TOTAL", "TOOK", "AGE")
    table = table_of(*numbers, "KIND", "TIER", "PROVEN", words=("KIND", "TIER", "PROVEN"))
    table.add_column("PATH", overflow="fold")
    for one in found:
        sizes = [size(bytes) if bytes is not None else "–" for bytes in (one.new_bytes, one.total_bytes)]
        took = seconds(one.seconds) if one.seconds is not None else "–"
        old = age(one.at) if one.at is not None else "–"
        row = (str(one.generation), *sizes, took, old, one.kind, one.tier, "✓" if one.verified else "–", Text(one.path))
        table.add_row(Text(str(one.step), "bold"), *row)
    return table


def difference(found: dict[str, Any]) -> RenderableType:
    """Of two checkpoints, element by element."""
    table = table_of("PARAMETER", "KIND", "UNLIKE", "OF", "LARGEST", words=("PARAMETER", "KIND"))
    for one in found["unlike"]:
        row = (one["kind"], f"{one['unlike']:,}", f"{one['elements']:,}", f"{one['largest']:.3g}")
        table.add_row(Text(one["line"], "bold"), *row)
    parts: list[RenderableType] = [table] if found["unlike"] else []
    for name in ("a", "b"):
        if found[f"only_{name}"]:
            parts.append(Text(f"only in {found[name]}: {', '.join(found[f'only_{name}'])}", "yellow"))
    parts.append(Text(f"{found['same_lines']} parameters are alike in every bit", "dim"))
    return Group(*parts)


def going(found: dict[str, Any]) -> RenderableType:
    """What a collection removes, or would."""
    lines = [
        Text.assemble((one["path"], "bold"), f"  {size(one['bytes'])}  ", (one["why"], "dim"), overflow="fold")
        for one in found["going"]
    ]
    done = "removed" if found["removed"] else "would go"
    lines.append(Text(f"{len(found['going'])} {done}, {size(found['bytes'])}; {len(found['kept'])} kept"))
    return Group(*lines)
