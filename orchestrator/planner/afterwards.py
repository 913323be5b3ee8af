"""A running plan as the search would have proposed it, whoever made it, and what to run after a loss (replan.py)."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.plan import Plan

from .ask import Ask, Proposal
from .compose import Member
from .heirs import in_place
from .job import ask_of
from .machines import Machines, of_devices
from .owning import fits_as_it_is, with_shares, words
from .replan import Change, Current, Outlook, placed, replan
from .search import Benches, price
from .words import measured_words


def look_ahead(request: ChoosePlan) -> Outlook:
    """The best plans for the loss of one node and of one device of each class, searched before it happens."""
    machines = of_devices(request.devices, request.table, domains=request.domains, speeds=request.speeds)
    outlook = Outlook(
        ask=ask_of(request.spec, request.profile, machines, seen=request.measured, kinds=request.table), benches=Benches()
    )
    outlook.prepare()
    return outlook


def after_loss(request: ChoosePlan, ahead: Outlook | None = None) -> Plan | None:
    """What is cheapest of absorbing, repairing and re-shaping, by moving + horizon; None where nothing ran or nothing fits.

    What the request's running plan has and its devices lack is lost. ahead: an outlook on a cluster that may be this one;
    without it the search for what is left stops where nothing could cost less, so of losing options other ones may be told.
    """
    running = request.running
    if running is None or running.tp != (request.spec.parallel.tp or running.tp):
        return None
    here = dict(request.devices)
    every = {**dict(request.lost), **here}
    whole = of_devices(every.items(), request.table, domains=request.domains, speeds=request.speeds)
    ask = ask_of(request.spec, request.profile, whole, seen=request.measured, kinds=request.table)
    outlook = ahead if ahead is not None and ahead.ask == ask else Outlook(ask=ask, benches=Benches())
    current = current_of(running, whole, ask, outlook.benches)
    if current is None:
        return None
    gone = {device for machine in whole.nodes for device in machine.devices} - set(here)
    nodes = [m.node for m in whole.nodes if set(m.devices) <= gone]
    devices = sorted(device for device in gone if device.node not in nodes)
    change = replan(current, outlook, nodes=nodes, devices=devices, horizon=request.horizon_steps)
    if not isinstance(change, Change):
        return None
    plan = placed(change, current, nodes, devices)
    plan = replace(plan, reason=plan.reason + measured_words(ask.measured, request.measured))
    wanted = request.spec.parallel
    is_allowed = wanted.min_devices <= plan.world_size <= (wanted.max_devices or plan.world_size)
    if not is_allowed or not set(plan.devices) <= set(here):
        return None
    # Who goes on owns what it owned, and a part of what is free, unless that is too much for it.
    anew = with_shares(plan, request.spec, request.profile, here, request.speeds, request.table)
    for shared in (in_place(plan, running, anew), plan) if change.kept else ():
        if fits_as_it_is(shared, request.spec, request.profile, here, request.table):
            return shared
    return anew and replace(anew, reason=anew.reason + words(anew, here))


def current_of(plan: Plan, machines: Machines, ask: Ask, benches: Benches) -> Current | None:
    """None where the machines lack one of its devices."""
    keys = {machine.node: machine.key for machine in machines.nodes}
    if not set(plan.nodes) <= set(keys):
        return None
    bench = benches.of(replace(ask, machines=machines), plan.tp, ask.batches[0].samples, ask.recompute[0])
    index = {one.key: number for number, one in enumerate(bench.classes)}
    members = []
    for pipeline in plan.pipelines:
        classes = tuple(index[keys[stage.devices[0].node]] for stage in pipeline.stages)
        bounds = (*(stage.first for stage in pipeline.stages), pipeline.stages[-1].last)
        members.append(Member(track=bench.cut(classes, bounds), ids=(len(pipeline.micro_batches),)))
    proposal = Proposal(
        tp=plan.tp,
        batch=ask.batches[0],
        recompute=ask.recompute[0],
        keys=tuple(one.key for one in bench.classes),
        members=tuple(members),
        breakdown=price(bench, tuple(members)),
    )
    return Current(proposal=proposal, plan=plan, machines=machines)
