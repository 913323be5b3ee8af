"""One job while the kernel works on it: its record so far, and what has been said and asked for in this step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.detection.straggler import Track
from orchestrator.domain.effects import CallHost, Effect
from orchestrator.domain.events import HistoryEntry, StepRecord
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord
from orchestrator.domain.kinds import DeviceKind
from orchestrator.domain.requests import HostRequest
from orchestrator.domain.state import TERMINAL, JobState, Paused, Reforming, Running, Starting
from orchestrator.domain.status import status_of
from orchestrator.jobs.transitions import check

from .ward import Ward

MAX_INCIDENTS = 100
"""Kept in a record; older ones stay in the history stream."""


MAX_WEIGHED = 4
"""Incidents that keep every option that was weighed."""


class Draft:
    """Mutable, and alive for one kernel step only.

    now: wall clock, for people. free_for: devices of reachable nodes that the arbiter grants the job and nobody else holds,
    its own included; asked each time, because jobs that are worked on in the same step claim and free devices. num_devices:
    of each node that is not lost. kinds: of the devices of each node that is known. root: the folder every node sees.
    ward: what is held against devices, of all jobs. draining: nodes that jobs are to leave. tracks: how fast devices have
    been seen to be. everything: devices of the cluster that jobs may be placed on. rows: kinds that not everybody knows.
    """

    def __init__(
        self,
        record: JobRecord,
        now: float,
        free_for: Callable[[JobId], frozenset[Device]],
        num_devices: Callable[[], Mapping[NodeId, int]],
        kinds: Callable[[], Mapping[NodeId, str]],
        root: str,
        ward: Ward,
        draining: Callable[[], frozenset[NodeId]],
        tracks: Mapping[Device, Track] | None = None,
        awaits_nodes: Callable[[], bool] = lambda: False,
        everything: Callable[[], frozenset[Device]] = frozenset,
        rows: Callable[[], tuple[DeviceKind, ...]] = tuple,
    ) -> None:
        self.before = record
        self.record = record
        self.now = now
        self._free_for = free_for
        self._num_devices = num_devices
        self._kinds = kinds
        self.root = root
        self.ward = ward
        self._draining = draining
        self._awaits_nodes = awaits_nodes
        self._everything = everything
        self._rows = rows
        self.tracks: Mapping[Device, Track] = tracks or {}
        self.paces: dict[Device, float] = {}
        """What ranks have said in this kernel step."""
        self.actor = ""
        """Whose command is being carried out."""
        self.history: list[HistoryEntry] = []
        self.steps: list[StepRecord] = []
        self.effects: dict[EffectId, Effect] = {}
        self._outbox: dict[EffectId, Effect] | None = None
        """The record's, once it is this draft's own: thousands of hosts are told the same, and answer, in one step."""

    @property
    def state(self) -> JobState:
        return self.record.state

    @property
    def usable(self) -> frozenset[Device]:
        free, barred = self._free_for(self.record.id), self.record.barred
        return frozenset(device for device in free if device.node not in barred) if barred else free

    @property
    def everything(self) -> frozenset[Device]:
        """Devices that jobs may be placed on, whoever holds them, without those that this job does not use."""
        shunned = self.record.barred | self.record.avoided
        return frozenset(device for device in self._everything() if device.node not in shunned)

    @property
    def num_devices(self) -> Mapping[NodeId, int]:
        return self._num_devices()

    @property
    def kinds(self) -> Mapping[NodeId, str]:
        return self._kinds()

    @property
    def rows(self) -> tuple[DeviceKind, ...]:
        """Kinds that the configuration or nodes' own benchmarks describe otherwise than everybody knows them."""
        return self._rows()

    @property
    def draining(self) -> frozenset[NodeId]:
        """Nodes that jobs are to leave."""
        return self._draining()

    @property
    def awaits_nodes(self) -> bool:
        """Some have come of which it will be known in a moment whether they are fit."""
        return self._awaits_nodes()

    @property
    def checkpoint_folder(self) -> str:
        """Of this job's own checkpoints: a path or a URL."""
        return self.record.spec.checkpoint.folder_of(self.record.id, self.root)

    @property
    def is_over(self) -> bool:
        return isinstance(self.record.state, TERMINAL)

    def set(self, **changes: Any) -> None:
        self.record = self.record.changed(changes)

    def turn(self, **changes: Any) -> None:
        """Of the record's `turn`."""
        self.set(turn=replace(self.record.turn, **changes))

    def become(self, state: JobState) -> None:
        self.set(state=check(self.record.state, state))
        self._count_time(isinstance(state, Starting | Running | Reforming))
        if isinstance(state, Paused):
            self.leave_queue()
            if self.record.started_at is not None and self.record.paused_since is None:
                self.set(paused_since=self.now)

    def _count_time(self, holds: bool) -> None:
        turn = self.record.turn
        if holds and turn.held_since is None:
            self.turn(held_since=self.now)
        elif not holds and turn.held_since is not None:
            self.turn(held_s=self.record.held_until(self.now), held_since=None)

    def leave_queue(self) -> None:
        """It is not put aside for others any more: it trains again, or its owner has paused it."""
        turn = self.record.turn
        if turn.is_preempted:
            queued_s = self.record.queued_until(self.now)
            self.turn(is_preempted=False, queued_s=queued_s, queued_since=None)

    def emit(self, effect: Effect) -> None:
        identity = EffectId(f"{self.record.id}:{self.record.next_effect}")
        self.effects[identity] = effect
        self._own_outbox()[identity] = effect
        self.set(next_effect=self.record.next_effect + 1)

    def call(self, node: NodeId, request: HostRequest) -> None:
        self.emit(CallHost(job=self.record.id, node=node, request=request))

    def done(self, effect: EffectId) -> None:
        if effect in self.record.outbox:
            del self._own_outbox()[effect]

    def _own_outbox(self) -> dict[EffectId, Effect]:
        if self._outbox is None or self.record.outbox is not self._outbox:
            self._outbox = dict(self.record.outbox)
            self.set(outbox=self._outbox)
        return self._outbox

    def say(self, kind: str, message: str, **data: object) -> None:
        if self.actor:
            message, data = f"{message}; asked by {self.actor}", {**data, "by": self.actor}
        self.history.append(
            HistoryEntry(
                job=self.record.id,
                at=self.now,
                type=kind,
                message=message,
                status=status_of(self.record.state),
                generation=self.record.generation,
                step=self.record.committed,
                data=data,
            )
        )

    def risk(self, why: str) -> None:
        """Why one more failure could cost committed steps, "" where it could not; told when it changes."""
        if why == self.record.at_risk:
            return
        self.set(at_risk=why)
        if why:
            self.say("at_risk", f"one more failure may cost committed steps: {why}")
        else:
            self.say("mirrored", "every interval has two holders apart again")

    # --- the incident under way -------------------------------------------------------------------------------------------

    @property
    def incident(self) -> Incident | None:
        return self.record.incidents[-1] if self.record.incidents else None

    def open_incident(self, incident: Incident) -> None:
        # What was weighed stays in the history; a record is written with every step.
        earlier = self.record.incidents
        slim = tuple(replace(one, options=()) if one.options else one for one in earlier[:-MAX_WEIGHED])
        kept = slim + earlier[-MAX_WEIGHED:]
        self.set(incidents=(*kept, incident)[-MAX_INCIDENTS:])

    def update_incident(self, *, phases: Mapping[str, float] | None = None, **changes: Any) -> None:
        last = self.incident
        if last is not None:
            merged = replace(last, phases={**last.phases, **(phases or {})}, **changes)
            self.set(incidents=(*self.record.incidents[:-1], merged))

    # --- what is known of hosts -------------------------------------------------------------------------------------------

    def forget_host(self, node: NodeId) -> None:
        self.set(hosts=self.record.hosts - {node})
        self.forget_processes(node)

    def forget_processes(self, node: NodeId) -> None:
        """Nothing the host on `node` was asked is owed any more, and its ranks count no longer."""
        self.set(
            warm=self.record.warm - {node},
            copies={at: copies for at, copies in self.record.copies.items() if at != node},
            unreachable=self.record.unreachable - {node},
            spares={spare: found for spare, found in self.record.spares.items() if spare != node},
            pids={device: pid for device, pid in self.record.pids.items() if device.node != node},
            ending={device: pid for device, pid in self.record.ending.items() if device.node != node},
            listeners={device: at for device, at in self.record.listeners.items() if device.node != node},
            outbox={i: e for i, e in self.record.outbox.items() if not (isinstance(e, CallHost) and e.node == node)},
        )
        self.ward.forget_tester(self.record.id, node)

    def forget_rank(self, device: Device) -> None:
        self.set(
            pids={d: pid for d, pid in self.record.pids.items() if d != device},
            listeners={d: at for d, at in self.record.listeners.items() if d != device},
        )

    @property
    def trusted_hosts(self) -> frozenset[NodeId]:
        """Those that have not been given up."""
        return self.record.hosts - self.record.avoided

    def next_generation(self) -> Generation:
        return Generation(max(self.record.generation, self.record.reserved) + 1)

    @property
    def spare_devices(self) -> frozenset[Device]:
        return frozenset(device for spare in self.record.spares.values() for device in spare.devices)

    def warm_devices(self, usable: frozenset[Device]) -> frozenset[Device]:
        return frozenset(device for device in usable if device.node in self.record.warm)
