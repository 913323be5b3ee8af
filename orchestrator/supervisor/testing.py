"""Who tests the devices that are kept out: a host of some job on their node, asked once and again where it ended first."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.domain.host_events import SelfTested
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.quarantine import Standing
from orchestrator.domain.requests import SelfTest
from orchestrator.domain.state import Queued, Reforming, Running, Starting

from .draft import Draft
from .forming import open_host
from .ward import Ward


def attend(ward: Ward, drafts: Iterable[Draft], living: frozenset[NodeId]) -> None:
    """Ask for every self-test that nobody has been asked for. living: nodes that are up.

    A job that has a host there is asked first, else one opens a host for it.
    """
    ward.forget_old()
    able = [draft for draft in drafts if _can_test(draft)]
    for device in ward.untested():
        tester = _tester(able, device) if device.node in living else None
        if tester is not None:
            open_host(tester, device.node)
            tester.call(device.node, SelfTest(device=device))
            ward.asked(device, tester.record.id)


def self_tested(draft: Draft, said: SelfTested) -> None:
    found = draft.ward.hear(said)
    if found is None:
        return  # told again, or an operator was quicker
    if found.standing is Standing.RELEASED:
        draft.say("released", f"{said.device} may be used again: {said.message}", device=str(said.device))
    else:
        message = f"{said.device} stays out until an operator releases it: {said.message}"
        draft.say("self_test_failed", message, device=str(said.device))


def _can_test(draft: Draft) -> bool:
    return isinstance(draft.state, Queued | Starting | Running | Reforming) and draft.record.profile is not None


def _tester(able: Iterable[Draft], device: Device) -> Draft | None:
    able = [draft for draft in able if device.node not in draft.record.avoided]
    with_host = [draft for draft in able if device.node in draft.record.hosts]
    return next(iter([*with_host, *able]), None)
