"""What jobs that share a cluster are told of each other: projects with quotas, and why a job waits and for what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import Device, JobId

MAX_PRIORITY = 1000
DEFAULT_PROJECT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Jobs that share a quota. max_devices: of all of them together; None for no limit."""

    name: str
    max_devices: int | None = None


class WaitReason(StrEnum):
    """Why a job has no devices: all there are."""

    PROBING = "probing"
    """Its program is being described."""
    PLANNING = "planning"
    """It has its turn, and a plan is being chosen."""
    MAKING_ROOM = "making_room"
    """It has its turn: what it will run on is being given up by others."""
    BUSY = "busy"
    """It would fit if others ended."""
    BEHIND = "behind"
    """What is free is kept for a job before it."""
    QUOTA = "quota"
    """Its project has as many devices as it may have."""
    INFEASIBLE = "infeasible"
    """No part of the cluster as it is could hold it, whoever ended."""
    NO_CLUSTER = "no_cluster"
    """The cluster has not been seen yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One job of the queue. position: from 1, in the order in which jobs get devices. least: devices without which it
    does not start."""

    job: JobId
    position: int
    reason: WaitReason
    message: str
    priority: int = 0
    project: str = DEFAULT_PROJECT
    least: int = 1
    since: float = 0.0
    """When it was submitted: wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A job among others, as its record keeps it."""

    priority: int | None = None
    """As it was last changed; None: as the job was submitted."""
    yields: frozenset[Device] = frozenset()
    """What it holds and is to give up, because a job of higher priority cannot start without."""
    yields_to: JobId = JobId("")
    cleared: frozenset[Device] = frozenset()
    """Of these, where a process has been told to end."""
    floor: int = 0
    """A planner has found no plan on fewer devices than this."""
    asked: frozenset[Device] = frozenset()
    """For which devices a plan was last asked for,"""
    asks_whether: bool = False
    """and only to know whether the cluster as a whole could hold the job."""
    judged: frozenset[Device] = frozenset()
    """Of what the cluster had when that was known last,"""
    infeasible: str = ""
    """and why it could not hold it; empty where it could, or where that is not known."""
    wait: WaitReason | None = None
    """What people were told last."""
    is_preempted: bool = False
    """It waits because it was put aside for a job of higher priority."""
    queued_s: float = 0.0
    """For which it was put aside so, restarts included,"""
    queued_since: float | None = None
    """and since when, until it trains again."""
    held_s: float = 0.0
    """For which it has been on devices, or was about to be,"""
    held_since: float | None = None
    """and since when; None while it is not."""
    unsaved_until: float = 0.0
    """Wall clock: it could not be saved when it was to be put aside, and is left alone until then."""
