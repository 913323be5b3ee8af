"""Why a plan was chosen, what the others lost by, and what a plan survives, in sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.balance import StageTime

from .ask import Proposal
from .constants import Measured

CAUSES = ("compute", "tp", "bubble", "p2p", "dp", "optimizer")
NAMES = {
    "compute": "computing",
    "tp": "tensor-parallel collectives",
    "bubble": "waiting in the pipeline",
    "p2p": "passing activations on",
    "dp": "reduction over replicas",
    "optimizer": "the update",
}
SMALL = 0.0005


def lost_by(loser: Proposal, best: Proposal) -> str:
    """`4 % slower: 0.31 s against 0.10 s of waiting in the pipeline`."""
    slower = loser.seconds / best.seconds - 1
    if slower < SMALL:
        return "as fast; it came second by its number of devices"
    cause = max(CAUSES, key=lambda name: getattr(loser.breakdown, name) - getattr(best.breakdown, name))
    mine, theirs = getattr(loser.breakdown, cause), getattr(best.breakdown, cause)
    return f"{slower:.1%} slower, mostly by {NAMES[cause]}: {mine:.3g} s against {theirs:.3g} s"


def won_by(best: Proposal, tried: int) -> str:
    """One sentence: what it is, how fast, and how far from what devices could do at most."""
    share = best.bound_s / best.seconds if best.seconds else 0.0
    return (
        f"{best.shape()} is the fastest of {tried} ways tried: {best.seconds:.3g} s a step, "
        f"{share:.0%} of what {best.num_devices} devices and those left idle could do at most"
    )


def measured_words(measured: Measured, seen: Sequence[StageTime]) -> str:
    """`; stage times are measured: A100 1.1 times as long as predicted`; nothing where nothing was seen."""
    if not seen:
        return ""
    kinds = sorted({one.kind for one in seen})
    said = [f"{kind} {measured.factors.get(kind, 1.0):.3g} times as long as predicted" for kind in kinds]
    return f"; stage times are measured: {', '.join(said)}"
