"""The plan that the search finds for a job: pipelines of unequal depth, splits and ids, each as fast as its kind.

For devices that are what their kind says, or take the time that it would (train.emulated_layer_s). Other emulated nodes
share this machine's processors whatever they are called, so jobs on them get plans that treat all devices alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device
from orchestrator.domain.plan import Plan
from orchestrator.domain.rows import words as row_words

from .afterwards import after_loss
from .ask import Ask, NoPlan, Planned
from .job import ask_of
from .machines import Machines, of_devices
from .owning import with_shares, words
from .placement import place
from .replan import Outlook
from .search import search
from .words import measured_words, won_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A job's plan. ask, found: what the search was asked and found, its best being the plan; None of plans that are not
    the search's, or go on after a loss.
    """

    plan: Plan
    ask: Ask | None = None
    found: Planned | None = None


def is_searched(request: ChoosePlan) -> bool:
    """Whether its devices are for real what their kinds say, or as good as."""
    train = request.spec.train
    return train.device == "cuda" or train.emulated_layer_s > 0


def choose_searched(request: ChoosePlan, ahead: Outlook | None = None, machines: Machines | None = None) -> Choice | None:
    """The fastest plan, on devices that hold state where there is a choice; None where there is none.

    After a loss, the one that is cheapest to go on with; ahead: what was searched for that before. machines: see `decide`.
    """
    if (after := after_loss(request, ahead)) is not None:
        return Choice(plan=after)
    if machines is None:
        machines = of_devices(request.devices, request.table, domains=request.domains, speeds=request.speeds)
    ask = ask_of(request.spec, request.profile, machines, seen=request.measured, kinds=request.table)
    choice = _placed(request, ask, found := search(ask))
    if choice is None and isinstance(found, Planned) and found.best.is_uneven:
        choice = _placed(request, ask := replace(ask, uneven=False), search(ask))
    return choice


def _placed(request: ChoosePlan, ask: Ask, found: Planned | NoPlan) -> Choice | None:
    """None also where its state does not fit memory, wherever the mirrors turn out to be."""
    if not isinstance(found, Planned):
        return None
    held = set(request.keep)

    def stranger(group: tuple[Device, ...]) -> int:
        return -sum(device in held for device in group)

    said = measured_words(ask.measured, request.measured) + corrected_words(request)
    reason = won_by(found.best, found.tried, ask) + said
    plan = place(found.best, ask.machines, reason=reason, prefer=stranger)
    kinds = dict(request.devices)
    shared = with_shares(plan, request.spec, request.profile, kinds, request.speeds, request.table)
    if shared is None:
        return None
    return Choice(plan=replace(shared, reason=shared.reason + words(shared, kinds)), ask=ask, found=found)


def corrected_words(request: ChoosePlan) -> str:
    used = {kind for _, kind in request.devices}
    return "".join(f"; {said}" for row in request.rows if row.name in used and (said := row_words(row)))
