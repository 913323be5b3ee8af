"""The reductions we offer, each taken strictly in group order so that the result has the same bits on every member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Operator:
    function: Any
    """torch.add, torch.maximum or torch.minimum; takes out=."""

    def combine(self, parts: list[torch.Tensor], me: int, out: torch.Tensor) -> None:
        """out = parts[0] op parts[1] op ..., strictly in that order; every part but parts[me] may be overwritten."""
        total = parts[0]
        if len(parts) == 1:
            if out.data_ptr() != total.data_ptr():
                out.copy_(total)
            return
        for part in parts[1:-1]:
            # parts[me] is the caller's own tensor: where it comes first, sum into `out`, which is that tensor or a new one.
            total = self.function(total, part, out=out if total is parts[0] and me == 0 else total)
        self.function(total, parts[-1], out=out)


_OPERATORS = (
    (dist.ReduceOp.SUM, Operator(torch.add)),
    (dist.ReduceOp.MAX, Operator(torch.maximum)),
    (dist.ReduceOp.MIN, Operator(torch.minimum)),
)


def operator_of(opts: Any) -> Operator:
    """opts: c10d options with a reduceOp, a ReduceOp, or None for a sum. Raises ValueError."""
    wanted = getattr(opts, "reduceOp", opts)
    if wanted is None:
        return _OPERATORS[0][1]
    for op, operator in _OPERATORS:
        if wanted == op:
            return operator
    raise ValueError(f"{wanted} is not available on links; use SUM, MAX or MIN")
