"""What one device hands over to be saved: a copy of what it owns, right after a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orchestrator.adapters.index import GRADIENT
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Generation, Step

from ..state.pieces import KINDS, Piece

if TYPE_CHECKING:  # who writes needs no torch, which takes seconds to import
    from ..state.holdings import Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Right after `step`, which `answer` committed.

    state: (len(kinds), n) fp32, one row for each of `kinds`: the whole state, or the gradient that led to it.
    """

    step: Step
    answer: Answer | None
    generation: Generation
    pieces: tuple[Piece, ...]
    state: NDArray[np.float32]
    kinds: tuple[str, ...] = KINDS

    @staticmethod
    def of(holdings: Holdings, generation: Generation, answer: Answer | None = None) -> Snapshot:
        # Row by row: an accelerator has no room for a dense copy.
        state = np.stack([row[: holdings.owned].cpu().numpy() for row in holdings.state])
        return Snapshot(step=holdings.step, answer=answer, generation=generation, pieces=holdings.owned_pieces, state=state)

    @staticmethod
    def of_gradient(holdings: Holdings, generation: Generation, answer: Answer) -> Snapshot:
        """A journal entry: what the update of `holdings.step` used, which holdings keep until the next gradient comes."""
        return Snapshot(
            step=holdings.step,
            answer=answer,
            generation=generation,
            pieces=holdings.owned_pieces,
            state=holdings.gradient[None, : holdings.owned].cpu().numpy().copy(),
            kinds=GRADIENT,
        )
