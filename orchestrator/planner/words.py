"""Why a plan was chosen, what the others lost by, and what a plan survives, in sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.balance import StageTime

from .ask import Ask, Proposal
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


def won_by(best: Proposal, tried: int, ask: Ask) -> str:
    """What it is, how fast, how far from what devices could do at most, and why some of them are idle."""
    share = best.bound_s / best.seconds if best.seconds else 0.0
    idle = ask.machines.num_devices - best.num_devices
    ways = f"the fastest of {tried} ways tried" if tried > 1 else "the only way tried"
    devices = counted(best.num_devices, "device", "devices")
    limited = ask.limits.max_devices or ask.machines.num_devices
    whose = f"{devices} and those left idle" if min(limited, ask.machines.num_devices) > best.num_devices else devices
    said = f"{best.shape()} is {ways}: {best.seconds:.3g} s a step, {share:.0%} of what {whose} could do at most"
    return f"{said}; {idle:,} idle: {_why_idle(best, ask)}" if idle else said


def _why_idle(best: Proposal, ask: Ask) -> str:
    limits, ids = ask.limits, best.batch.micro_batches
    stages = sum(member.track.depth * len(member.ids) for member in best.members)
    if limits.max_devices and best.num_devices + best.tp > limits.max_devices:
        return f"max_devices is {limits.max_devices}"
    if limits.replicas is not None:
        return f"parallel.dp is {limits.replicas}, and more stages would not make it faster"
    if stages + min(best.depths) > ids:
        return f"{ids} micro-batches keep no more pipelines busy; more and smaller ones would (train.micro_batches)"
    taken = best.groups()
    used = {key.name for key, number in taken.items() if number}
    unused = {one.kind.name for one in ask.machines.classes} - used
    if unused:
        return f"with {listed(sorted(unused))} a step would take longer, or not fit memory"
    return "too few for another pipeline"


def counted(number: int, one: str, many: str) -> str:
    """`1 device`, `2,048 devices`."""
    return f"{number:,} {one if number == 1 else many}"


def listed(names: Sequence[str], word: str = "and") -> str:
    """`A100, H100 and B200`."""
    return f" {word} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def measured_words(measured: Measured, seen: Sequence[StageTime]) -> str:
    """`; stage times are measured: A100 1.1 times as long as predicted`; nothing where nothing was seen."""
    if not seen:
        return ""
    kinds = sorted({one.kind for one in seen})
    said = [f"{kind} {measured.factors.get(kind, 1.0):.3g} times as long as predicted" for kind in kinds]
    return f"; stage times are measured: {', '.join(said)}"
