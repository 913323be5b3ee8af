"""The table of kinds that plans are made with: known rows, those of the configuration, and what nodes' own benchmarks say.

A data sheet is of one model of a kind, at its full power; cards that are sold under the same name reach less. The large
product of every node's check (worker/selftest.py) tells. Its median over a kind's nodes corrects the kind's row, in steps
of STEP and within bounds: a measurement may be disturbed. One node that is slower than its like is a straggler, not a kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from .admission import Admission, Admittance
from .ids import NodeId
from .kinds import DeviceKind, table

PRODUCT_SHARE = 0.80
"""Of its row's peak that a device reaches in a large product of matrices; see planner/constants.py."""
STEP = 0.05
"""Smaller differences make no other plan."""
IGNORED = 0.1
LEAST, MOST = 0.5, 1.25
"""Of the row's figure."""


def corrected(
    rows: Iterable[DeviceKind], kinds: Mapping[NodeId, str], admissions: Iterable[Admission]
) -> tuple[DeviceKind, ...]:
    """Rows that differ from those everybody knows. rows: of the configuration; kinds: of the nodes that are there."""
    made = {row.name: row for row in rows}
    known = table(made.values())
    seen: dict[str, list[float]] = defaultdict(list)
    for one in admissions:
        kind = kinds.get(one.node, "")
        if one.tflops and one.standing is Admittance.ADMITTED and kind in known:
            seen[kind].append(one.tflops)
    for kind, rates in sorted(seen.items()):
        row, rate = known[kind], median(rates)
        factor = _factor(rate / (PRODUCT_SHARE * row.bf16_tflops))
        if factor != 1.0:
            said = f"{row.sources.get('bf16_tflops', 'the configuration')}, {row.bf16_tflops:g}, times {factor:g}: a large "
            said += f"product ran at {rate:.3g} on {len(rates)} nodes"
            made[kind] = replace(
                row, bf16_tflops=row.bf16_tflops * factor, sources={**row.sources, "bf16_tflops": said}, is_corrected=True
            )
    return tuple(row for _, row in sorted(made.items()))


def words(row: DeviceKind) -> str:
    """`H100 counts as 742 TFLOP/s, by its nodes' own benchmark`; nothing of a row that is as it was written."""
    return f"{row.name} counts as {row.bf16_tflops:.3g} TFLOP/s, by its nodes' own benchmark" if row.is_corrected else ""


def _factor(ratio: float) -> float:
    bounded = min(MOST, max(LEAST, ratio))
    return 1.0 if abs(bounded - 1.0) <= IGNORED else round(round(bounded / STEP) * STEP, 2)
