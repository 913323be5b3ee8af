"""Quarantine while the kernel works on it: which devices are kept out of plans, and who was asked to test them.

It owns the list, which belongs to the cluster and outlives every job. Why a device is accused, the job says that gave the
evidence; a test is carried out by some job's host on that node, whoever's job it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.domain.host_events import SelfTested
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.quarantine import Quarantine, Standing
from orchestrator.recovery.quarantine import is_forgotten, struck, tested


class Ward:
    """Mutable, and alive for one kernel step only."""

    def __init__(self, known: Mapping[Device, Quarantine], now: float) -> None:
        self._before = dict(known)
        self._known = dict(known)
        self._now = now

    @property
    def known(self) -> Mapping[Device, Quarantine]:
        return self._known

    @property
    def has_changed(self) -> bool:
        return self._known != self._before

    @property
    def out(self) -> frozenset[Device]:
        """Devices that no plan may use."""
        return frozenset(device for device, one in self._known.items() if one.is_out)

    @property
    def awaits_tests(self) -> bool:
        """Some will be known to be sound, or not, in a moment."""
        return any(one.standing is Standing.TESTING and one.tester for one in self._known.values())

    def strike(self, device: Device, reason: str, job: JobId, generation: Generation) -> Quarantine | None:
        """What is held against it now; None where that is nothing new."""
        before = self._known.get(device)
        after = struck(before, device, reason, self._now, job, generation)
        self._known[device] = after
        return after if after != before else None

    def hear(self, said: SelfTested) -> Quarantine | None:
        """What has become of the device; None where nobody waited for this."""
        before = self._known.get(said.device)
        if before is None or before.standing is not Standing.TESTING:
            return None
        self._known[said.device] = tested(before, said.passed, said.message)
        return self._known[said.device]

    def release(self, node: NodeId) -> tuple[Quarantine, ...]:
        """An operator vouches for a node: nothing is held against its devices any more."""
        gone = tuple(one for device, one in sorted(self._known.items()) if device.node == node)
        self._known = {device: one for device, one in self._known.items() if device.node != node}
        return gone

    def forget_tester(self, job: JobId, node: NodeId | None = None) -> None:
        """Nothing asked of the job's hosts (on that node) will be answered."""
        for device, one in self._known.items():
            if one.tester == job and node in (None, device.node):
                self._known[device] = replace(one, tester=None)

    def untested(self) -> tuple[Device, ...]:
        """Devices whose test nobody has been asked for."""
        return tuple(d for d, one in sorted(self._known.items()) if one.standing is Standing.TESTING and not one.tester)

    def asked(self, device: Device, tester: JobId) -> None:
        self._known[device] = replace(self._known[device], tester=tester)

    def forget_old(self) -> None:
        self._known = {device: one for device, one in self._known.items() if not is_forgotten(one, self._now)}
