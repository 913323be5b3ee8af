"""Samples of what is stored and sent about nodes that are checked, for golden files and round trips."""

from __future__ import annotations

from orchestrator.domain.admission import Admission, Admittance, Checked
from orchestrator.domain.effects import CheckNode, Effect
from orchestrator.domain.events import Input, InstantCame, NodeChecked

from .samples import AT, NODE, OTHER

INSTANTS: tuple[Input, ...] = (InstantCame(key="goes:n-1:9.0"),)
ADMISSIONS = (
    Admission(node=NODE, since=AT, standing=Admittance.ADMITTED, life="1", number=1, said="all well", product_s=0.004),
    Admission(
        node=OTHER,
        since=AT,
        standing=Admittance.REFUSED,
        why="3 elements of a product of matrices are wrong",
        life="2",
        was_admitted=True,
        number=3,
        asked_at=AT,
        unanswered=1,
        peer=NODE,
        failed=(NODE,),
        suspects=(NODE,),
        strikes=2,
        struck_at=AT,
        is_here=False,
        is_lost=True,
        ends=(AT, AT + 1),
    ),
)
INPUTS: tuple[Input, ...] = (
    NodeChecked(
        node=NODE,
        number=2,
        found=Checked(wrong=("a",), pair_wrong="b", said="c", product_s=0.004, tflops=600.0),
    ),
)
EFFECTS: tuple[Effect, ...] = (CheckNode(node=NODE, number=2, peer=OTHER), CheckNode(node=NODE, number=1))
