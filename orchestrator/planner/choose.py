"""Which plan a job gets on which devices, and why.

Devices that are what they say get the plan that the search finds for them (searched.py), of one kind or of several. All
others, which share a machine's processors whatever they are called, get rectangular plans (rectangular.py).
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.profile import BLOCK, splits_a_block

from .machines import Machines
from .rectangular import choose_rectangular, kinds_of, lower
from .replan import Outlook
from .searched import Choice, choose_searched, is_searched


def choose_alike(request: ChoosePlan, _: Outlook | None = None) -> Plan | Infeasible:
    """What a planner chooses that takes all devices for alike: to compare with."""
    spec = replace(request.spec, train=replace(request.spec.train, device="cpu", emulated_layer_s=0.0))
    return choose(replace(request, spec=spec, devices=tuple((device, "cpu") for device, _ in request.devices), lost=()))


def choose(request: ChoosePlan, ahead: Outlook | None = None) -> Plan | Infeasible:
    """The best plan on the request's devices. Pure: the same request gives the same plan, whatever the devices' order.

    ahead: what was searched before for losses of a searched job; it makes the answer come sooner, not another one.
    """
    found = decide(request, ahead)
    return found.plan if isinstance(found, Choice) else found


def decide(request: ChoosePlan, ahead: Outlook | None = None, machines: Machines | None = None) -> Choice | Infeasible:
    """The same, with what was searched for it. machines: the request's devices, where links are other than their kinds'."""
    refusal = _never(request)
    if refusal:
        return Infeasible(reason=refusal, forever=True)
    if refusal := _beyond_limit(request):
        return Infeasible(reason=refusal)
    if request.spec.train.exact is True and len(kinds_of(request)) > 1:
        return _of_one_kind(request, machines)
    return _decide(request, ahead, machines)


def _beyond_limit(request: ChoosePlan) -> str:
    """Why it may have too few devices for what it asks, whatever there is; or nothing."""
    least, most = _least(request), request.spec.parallel.max_devices
    return f"needs {least} devices and may have {most}; raise its limit" if 0 < most < least else ""


def _least(request: ChoosePlan) -> int:
    wanted = request.spec.parallel
    return max(wanted.min_devices, (wanted.tp or 1) * (wanted.pp or 1) * (wanted.dp or 1))


def _of_one_kind(request: ChoosePlan, machines: Machines | None) -> Choice | Infeasible:
    """Exact jobs never mix kinds: the kind that holds the job's state, then the one with most usable devices."""
    kinds = kinds_of(request)
    whys = []
    for kind in kinds:
        alone = replace(request, devices=tuple((d, k) for d, k in request.devices if k == kind))
        found = _decide(alone, None, machines and machines.of_kind(kind))
        if isinstance(found, Choice):
            others = ", ".join(other for other in kinds if other != kind)
            said = f"{found.plan.reason}; {kind} alone ({others} unused), because train.exact is true"
            return replace(found, plan=replace(found.plan, reason=said))
        it = "it " if found.reason.startswith(("needs", "may")) else ""
        whys.append(f"on {kind} alone {it}{found.reason}")
    said = "; ".join(whys)
    return Infeasible(reason=f"train.exact is true, which takes one kind of device: {said}; or set it to best_effort")


def _decide(request: ChoosePlan, ahead: Outlook | None, machines: Machines | None) -> Choice | Infeasible:
    total, least = len(request.devices), _least(request)
    if total < least:
        return Infeasible(reason=f"needs {least} devices, {total} usable; lower {lower(request)} or wait for a node")
    if is_searched(request) and (searched := choose_searched(request, ahead, machines)):
        return searched
    found = choose_rectangular(request)
    return found if isinstance(found, Infeasible) else Choice(plan=found)


def _never(request: ChoosePlan) -> str:
    """Why no cluster could run it, in one sentence, or nothing."""
    wanted, profile, train = request.spec.parallel, request.profile, request.spec.train
    for divisor in profile.divisors:
        if wanted.tp and divisor.value % wanted.tp:
            return f"parallel.tp {wanted.tp} does not divide {divisor.field} {divisor.value}; choose a divisor of both"
    if train.exact and wanted.tp and (line := splits_a_block(profile, wanted.tp)):
        return (
            f"train.exact needs parts of whole blocks of {BLOCK} elements, parallel.tp {wanted.tp} cuts {line.name} "
            f"({line.numel} elements) inside one; lower tp or set train.exact to false"
        )
    if wanted.pp and wanted.pp > profile.num_layers:
        return f"parallel.pp {wanted.pp} exceeds the program's {profile.num_layers} layers; lower pp"
    if wanted.pp and wanted.pp > train.micro_batches // (wanted.dp or 1):
        return (
            f"parallel.pp {wanted.pp} exceeds the {train.micro_batches // (wanted.dp or 1)} micro-batches of a pipeline; "
            "lower pp or dp, or raise train.micro_batches"
        )
    if wanted.dp and wanted.dp > train.micro_batches:
        return f"parallel.dp {wanted.dp} exceeds train.micro_batches {train.micro_batches}; lower dp"
    return ""
