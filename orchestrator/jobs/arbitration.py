"""Who gets which devices: one answer for all jobs, from what each holds and wants. A pure function of a snapshot.

    order       priority, then who was submitted first; before all, to what is free, whoever a fault has broken
    minimum     in that order each waiting job gets all it needs to start, or nothing
    room        devices nobody holds; what others are leaving; of running jobs of lower priority what they can spare; all
                that is held by one that a fault broke long ago and that lacks what nobody has; only then all that running
                jobs of lower priority have. Each time the lowest and youngest first
    kept        the first job that cannot start keeps what is free of the devices it would need fewest others to end for:
                nobody after it gets those, so the devices it lacks never grow in number, and it starts once jobs end
    growth      what is left, in the same order, to whoever has not declined it

A grant is a set of devices; grants of two jobs never share one. It refuses to know how a job gets to another plan, and what
a plan looks like: a planner that finds none on a grant says so by a higher minimum next time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.domain.ids import Device, JobId, NodeId
from orchestrator.domain.queue import DEFAULT_PROJECT, WaitReason

from .picking import Need, capacity, pick

NOBODY: frozenset[Device] = frozenset()
LEAVING, IDLE, SPARED, STUCK, STOPPED = 1, 10**4, 10**8, 10**12, 10**16
"""What taking a device costs: any number of one sort is dearer than all of the sort before."""
MAX_TOLD = 64
"""Waiting jobs of which it is worked out who holds what they lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One job, as far as others are concerned.

    holds: devices it has anything on, or is about to; core: those it trains on. leaving: those of them that it is giving
    up, all of them where it ends. wants: it has to get its minimum before it can go on. gives: it can be made smaller, or
    put aside. is_stuck: it is broken and has waited long for devices, doing nothing with those it has. limit: of its size,
    0 for none. floor: no plan was found on fewer. declined: it has been planned for with these, and did better without.
    present: nodes it has a host on, and may go on using where nothing new is placed. shuns: nodes it does not use.
    infeasible: why nothing the cluster has would do; judged: what it had then, where that is asked again by who waits.
    """

    job: JobId
    priority: int = 0
    submitted_at: float = 0.0
    project: str = DEFAULT_PROJECT
    need: Need = Need()
    limit: int = 0
    floor: int = 0
    holds: frozenset[Device] = NOBODY
    core: frozenset[Device] = NOBODY
    leaving: frozenset[Device] = NOBODY
    ends: bool = False
    wants: bool = False
    grows: bool = False
    gives: bool = False
    is_stuck: bool = False
    declined: frozenset[Device] = NOBODY
    present: frozenset[NodeId] = frozenset()
    shuns: frozenset[NodeId] = frozenset()
    infeasible: str = ""
    judged: frozenset[Device] = NOBODY

    @property
    def place(self) -> tuple[int, float, JobId]:
        """In the queue."""
        return -self.priority, self.submitted_at, self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """devices: on which jobs may be placed, with their kinds, whoever holds them. closed: others, on which nothing new is
    placed, and whose holders may keep them. quotas: devices by project."""

    devices: Mapping[Device, str]
    claims: tuple[Claim, ...]
    closed: Mapping[Device, str] = field(default_factory=dict)
    quotas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    reason: WaitReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """grant: what the job may use. minimum: of that, what has to be free before it starts. yields: what it holds and is to
    leave, for the job yields_to. is_put_aside: all of it."""

    grant: frozenset[Device] = NOBODY
    minimum: frozenset[Device] = NOBODY
    yields: frozenset[Device] = NOBODY
    yields_to: JobId | None = None
    is_put_aside: bool = False
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arbitration:
    """order: every job, whoever comes first in the queue first. left: devices that are granted to nobody."""

    allotments: Mapping[JobId, Allotment]
    order: tuple[JobId, ...]
    left: frozenset[Device]


def arbitrate(snapshot: Snapshot) -> Arbitration:
    """The same snapshot gives the same answer, whatever the order of its claims."""
    return _Round(snapshot).run()


class _Round:
    """One arbitration under way."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.devices = snapshot.devices
        self.closed = snapshot.closed
        self.kinds = {**snapshot.devices, **snapshot.closed} if snapshot.closed else snapshot.devices
        self.claims = sorted(snapshot.claims, key=lambda claim: claim.place)
        self.of = {claim.job: claim for claim in self.claims}
        self.leavers = [claim for claim in self.claims if claim.leaving]
        self.givers = [claim for claim in reversed(self.claims) if claim.gives]
        self.stuck = [claim for claim in reversed(self.claims) if claim.is_stuck and claim.wants]
        self.quotas = snapshot.quotas
        self.sizes: Counter[str] = Counter()
        """Of projects. What is being given up counts until it is."""
        self.held: dict[Device, JobId] = {}
        for claim in self.claims:
            self.sizes[claim.project] += len(claim.holds)
            for device in claim.holds:
                self.held.setdefault(device, claim.job)
        self.free = set(snapshot.devices) - set(self.held)
        self.grants = {claim.job: set(claim.holds - claim.leaving) for claim in self.claims}
        self.minimum: dict[JobId, frozenset[Device]] = {}
        self.put_aside: dict[JobId, JobId] = {}
        """And for whom."""
        self.promised: dict[Device, JobId] = {}
        """What somebody still holds, and who gets it."""
        self.waits: dict[JobId, Wait] = {}
        self.kept: frozenset[Device] = NOBODY
        self.num_kept = 0
        """Of those, free now."""
        self.head: JobId | None = None
        self._needs: dict[tuple[Need, int, int, frozenset[NodeId]], Need | None] = {}

    def run(self) -> Arbitration:
        for claim in self.claims:
            if claim.wants and claim.holds:
                self._mend(claim)
        for claim in self.claims:
            if claim.wants and claim.job not in self.put_aside:
                self._start(claim)
        for claim in self.claims:
            if claim.grows and claim.job not in self.waits and claim.job not in self.put_aside:
                self._grow(claim)
        for claim in self.leavers:  # what nobody turned out to need
            if not claim.ends:
                self.grants[claim.job] |= claim.leaving - set(self.promised)
        return Arbitration(
            allotments={claim.job: self._allotment(claim) for claim in self.claims},
            order=tuple(claim.job for claim in self.claims),
            left=frozenset(self.free),
        )

    def _allotment(self, claim: Claim) -> Allotment:
        yields = {device: self.promised[device] for device in claim.holds if device in self.promised}
        return Allotment(
            grant=frozenset(self.grants[claim.job]),
            minimum=self.minimum.get(claim.job, NOBODY),
            yields=frozenset(yields),
            yields_to=self.put_aside.get(claim.job, min(yields.values(), default=None)),
            is_put_aside=claim.job in self.put_aside,
            wait=self.waits.get(claim.job),
        )

    # --- a minimum --------------------------------------------------------------------------------------------------------

    def _mend(self, claim: Claim) -> None:
        """One that a fault has broken gets what is free first: who is before it may wait for what it holds."""
        mine = self._mine(claim)
        need = self._need(claim, mine)
        if need is None or self._fits_nothing(claim) or pick(mine, need, self.kinds):
            return
        if not self._may_have(claim, need, mine):
            return
        if found := pick(self._open(claim, mine), need, self.kinds):
            self._give(claim, found)

    def _start(self, claim: Claim) -> None:
        mine = self._mine(claim)
        need = self._need(claim, mine)
        if need is None or self._fits_nothing(claim):
            self._wait(claim, WaitReason.INFEASIBLE, claim.infeasible or self._too_small(claim))
            return
        if pick(mine, need, self.kinds):
            return  # it has enough to go on with
        if not self._may_have(claim, need, mine):
            self._wait(claim, WaitReason.QUOTA, self._over_quota(claim, need))
            return
        pool = self._open(claim, mine)
        found = pick(pool, need, self.kinds) or self._make_room(claim, need, pool)
        if found:
            self._give(claim, found)
        else:
            self._keep(claim, need, mine)

    def _mine(self, claim: Claim) -> dict[Device, int]:
        return {
            device: 0
            for device in self.grants[claim.job]
            if device in self.devices or (device in self.closed and device.node in claim.present)
        }

    def _open(self, claim: Claim, mine: dict[Device, int]) -> dict[Device, int]:
        """What it could have without anybody giving something up for it."""
        return mine | {d: 0 for d in self.free if d.node not in claim.shuns} | self._leaving(claim)

    def _may_have(self, claim: Claim, need: Need, mine: dict[Device, int]) -> bool:
        """Whether its project's quota allows that. What it held and the cluster has no more may be replaced, and so may
        what it holds and cannot use: it leaves that as soon as it goes on."""
        room = self._room(claim)
        return room is None or need.num_devices - len(mine) <= room + len(claim.holds - self.devices.keys() - mine.keys())

    def _fits_nothing(self, claim: Claim) -> bool:
        return bool(claim.infeasible) and (not claim.judged or self.devices.keys() <= claim.judged)

    def _need(self, claim: Claim, mine: dict[Device, int]) -> Need | None:
        """What it has to get; None where the cluster has not even what it asked for."""
        key = claim.need, claim.floor, claim.limit, claim.shuns
        if mine or key not in self._needs:
            anything = {device: 0 for device in self.devices if device.node not in claim.shuns} | mine
            most = capacity(anything, claim.need, self.kinds)
            limit = claim.limit or most
            is_enough = most >= claim.need.num_devices <= limit
            found = replace(claim.need, least=max(claim.need.least, min(claim.floor, most, limit))) if is_enough else None
            if mine:
                return found
            self._needs[key] = found
        return self._needs[key]

    def _give(self, claim: Claim, found: frozenset[Device]) -> None:
        self.minimum[claim.job] = found
        self.sizes[claim.project] += len(found - claim.holds)
        self.promised |= dict.fromkeys(found - self.free - self.grants[claim.job], claim.job)
        self.grants[claim.job] |= found
        self.free -= found

    def _leaving(self, claim: Claim) -> dict[Device, int]:
        """What others are giving up: to anybody where they end, to a higher priority where they were made to."""
        return {
            device: LEAVING
            for other in self.leavers
            if other.job != claim.job and (other.ends or other.priority < claim.priority)
            for device in other.leaving
            if device not in self.promised and self._is_takeable(device, claim)
        }

    def _make_room(self, claim: Claim, need: Need, pool: Mapping[Device, int]) -> frozenset[Device] | None:
        """From running jobs of lower priority: what they can spare, and where that is too little, all that one has; first
        from those that make nothing of it."""
        lower = [one for one in self.givers if one.priority < claim.priority and one.job not in self.put_aside]
        # No plan was found for more than there is: one that takes all of it would be broken as before.
        is_hopeless = claim.is_stuck and need.least < claim.floor
        stuck = [one for one in self.stuck if self._stands_back(one, claim)] if not is_hopeless else []
        pool = dict(pool)
        spared = {other.job: self._spared(other) for other in lower}
        for number, other in enumerate(lower):
            for device, cost in spared[other.job].items():
                if self._is_takeable(device, claim):
                    pool.setdefault(device, cost + number)
        found = pick(pool, need, self.kinds)
        all_of = [(one, STUCK) for one in stuck] + [(one, STOPPED) for one in lower]
        for number, (other, cost) in enumerate(all_of) if not found else ():
            for device in self.grants[other.job]:
                if self._is_takeable(device, claim):
                    pool.setdefault(device, cost + number)
            if found := pick(pool, need, self.kinds):
                break
        if not found:
            return None
        stopped = [one for one in (*stuck, *lower) if found & self.grants[one.job] - spared.get(one.job, {}).keys()]
        for other in stopped:  # all it has is free then, and others need not become smaller for the same
            pool |= {device: LEAVING for device in self.grants[other.job] if device in pool}
        found = pick(pool, need, self.kinds)
        assert found is not None
        for other in (*stuck, *lower):
            if other in stopped:
                self.put_aside[other.job] = claim.job
                self.grants[other.job].clear()
            else:
                self.grants[other.job] -= found
        return found

    def _stands_back(self, stuck: Claim, claim: Claim) -> bool:
        """Two that are broken wait for what the other holds, for ever: the later one gives it up, or the one that even the
        whole cluster is too small for. Who lacks nothing any more is about to go on."""
        if stuck.job in self.minimum or stuck.job in self.put_aside or stuck.job == claim.job:
            return False
        mine = self._mine(stuck)
        need = self._need(stuck, mine)
        is_hopeless = need is None or need.least < stuck.floor or self._fits_nothing(stuck)
        if need is not None and not is_hopeless and pick(mine, need, self.kinds):
            return False
        return stuck.priority < claim.priority or (claim.is_stuck and (is_hopeless or claim.place < stuck.place))

    def _spared(self, other: Claim) -> dict[Device, int]:
        """What a running job can do without, and what taking it costs. It leaves nodes first where more is free."""
        mine = self.grants[other.job]
        core = mine & other.core
        crowd = Counter(device.node for device in self.free)
        least = replace(other.need, least=max(other.need.least, other.floor))
        keeps = pick({device: crowd[device.node] for device in core}, least, self.kinds)
        idle = dict.fromkeys(mine - core, IDLE)
        return idle if keeps is None else idle | dict.fromkeys(core - keeps, SPARED)

    def _is_takeable(self, device: Device, claim: Claim) -> bool:
        return device in self.devices and device not in self.kept and device.node not in claim.shuns

    # --- no minimum -------------------------------------------------------------------------------------------------------

    def _keep(self, claim: Claim, need: Need, mine: dict[Device, int]) -> None:
        """It has to wait. The first such job keeps what it will run on, as far as that becomes free."""
        if len(self.waits) >= MAX_TOLD and self.head is not None:
            self._wait(claim, WaitReason.BUSY, f"waits for {need.num_devices} devices, after many others")
            return
        pool = {d: 0 if d in self.free else LEAVING for d in self.devices if d.node not in claim.shuns} | mine
        open_now = {d: 0 for d in (self.free | self.kept) - set(self.held) if d.node not in claim.shuns} | mine
        if self.head is not None and pick(open_now, need, self.kinds):
            words = f"{self.num_kept} free devices are kept for {self.head}, which is before it"
            self._wait(claim, WaitReason.BEHIND, words)
            return
        wanted = pick(pool, need, self.kinds)
        assert wanted is not None  # see _need
        self._wait(claim, WaitReason.BUSY, self._busy(frozenset(d for d in wanted if pool[d])))
        if self.head is None:
            self.head, self.kept, self.num_kept = claim.job, wanted, len(wanted & self.free)
            self.free -= wanted

    def _wait(self, claim: Claim, reason: WaitReason, message: str) -> None:
        self.waits[claim.job] = Wait(reason=reason, message=message)

    # --- growth -----------------------------------------------------------------------------------------------------------

    def _grow(self, claim: Claim) -> None:
        mine, room = self.grants[claim.job], self._room(claim)
        limits = [*([claim.limit - len(mine)] if claim.limit else []), *([room] if room is not None else [])]
        more = sorted(d for d in self.free if d not in claim.declined and d.node not in claim.shuns)
        taken = set(more[: max(0, min(limits))] if limits else more)
        mine |= taken
        self.sizes[claim.project] += len(taken)
        self.free -= taken

    def _room(self, claim: Claim) -> int | None:
        """How many more devices the project's quota allows."""
        quota = self.quotas.get(claim.project)
        return None if quota is None else max(0, quota - self.sizes[claim.project])

    # --- words ------------------------------------------------------------------------------------------------------------

    def _busy(self, lacks: frozenset[Device]) -> str:
        kinds = Counter(self.devices[device] for device in lacks)
        more = " and ".join(f"{number} more {kind}" for kind, number in sorted(kinds.items()))
        holders = Counter(self.held[device] for device in lacks if device in self.held)
        of = Counter(self.held[d] for d in self.devices if d in self.held and self.devices[d] in kinds)
        total = sum(1 for kind in self.devices.values() if kind in kinds)
        named = sorted(holders, key=lambda job: (-holders[job], job))
        said = [f"{of[job]} of {total} are held by {job} (priority {self.of[job].priority})" for job in named[:3]]
        if len(named) > 3:
            said.append(f"others by {len(named) - 3} more jobs")
        return f"waits for {more}" + (f": {', '.join(said)}" if said else ", which others were before it for")

    def _too_small(self, claim: Claim) -> str:
        need = claim.need
        shape = f" in groups of {need.tp} on one node" if need.tp > 1 else ""
        if claim.limit and claim.limit < need.num_devices:
            return f"needs {need.num_devices} devices{shape} and may have {claim.limit}; raise its limit"
        kind = " of one kind" if need.one_kind else ""
        return f"needs {need.num_devices} devices{shape}{kind}, {len(self.devices)} are there; lower its size or add nodes"

    def _over_quota(self, claim: Claim, need: Need) -> str:
        quota = self.quotas[claim.project]
        return (
            f"needs {need.num_devices} devices, and project {claim.project} has {self.sizes[claim.project]} of the {quota} "
            "it may have; wait for its jobs to end, or raise its quota"
        )
