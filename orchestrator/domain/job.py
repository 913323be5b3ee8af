"""A job as the control plane keeps it: what was asked, what state it is in, and what has happened to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .access import Submitter
from .balance import Rebalance, Straggler
from .checkpoint import After, Canary, CheckpointRef, Pacing, SaveCost, ShardRef
from .copying import Copying
from .effects import Effect
from .failure import Failure
from .faults import Injected
from .generation import Answer, Evaluation
from .ids import Device, EffectId, Generation, JobId, NodeId, Step
from .incident import Incident
from .plan import Plan
from .profile import Profile
from .queue import Turn
from .sight import RankSight
from .size import Size
from .spec import JobSpec
from .state import JobState, Join

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """Hosts have been asked what their ranks do, because a rank may stand still."""

    generation: Generation
    number: int
    asked: frozenset[NodeId]
    why: str
    seen: Mapping[NodeId, tuple[RankSight, ...]] = field(default_factory=dict)
    suspected: tuple[str, ...] = ()
    """What the look before found, where it must be found twice; see supervisor/stalling.py."""
    is_alarm: bool = True
    """A host said that a rank stands still. Otherwise a host has gone silent: does anybody wait for its ranks?"""
    after_s: float = 0.0
    """Nobody has been asked yet: all are, once this has passed."""
    asked_at: float = 0.0
    """Wall clock."""
    fresh_s: float = 0.0
    """How long after that what was seen still says something of what is so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A job is to pause. told: the generation whose ranks were asked to make no step after one that they save; step: that
    one, once they say so; failed: the last one that could not be saved since, and why."""

    told: Generation = Generation(0)
    step: Step | None = None
    failed: Step | None = None
    why: str = ""
    resumes: bool = False
    """It was told too late that it need not: it goes on at once."""
    preempted: str = ""
    """Its devices are for a job of higher priority: it waits in the queue after that. Empty where its owner paused it."""
    ends: str = ""
    """It has had its time, and ends once it is saved, or cannot be; empty where it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """A host on an idle node whose ranks stand by. Its devices are this job's.

    asked_for: the generation whose plan its ranks were last asked to be built for, 0 where they have to be asked.
    """

    devices: tuple[Device, ...]
    domain: str = ""
    asked_for: Generation = Generation(0)
    is_ready: bool = False
    deaths: int = 0
    """Of ranks that stood by."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Everything the control plane keeps about one job (its metrics and events are streams beside it).

    Not slotted, so that `changed` can copy all of it at once.
    """

    id: JobId
    spec: JobSpec
    state: JobState
    created_at: float
    version: int = STATE_VERSION
    by: Submitter | None = None
    """Who submitted it; None where nobody was asked, or before that was kept."""
    profile: Profile | None = None
    size: Size | None = None
    """As it was last changed; None: as the job was submitted."""
    pause: Pause | None = None
    turn: Turn = Turn()
    generation: Generation = Generation(0)
    """The newest ever used."""
    committed: Step = Step(0)
    last_answer: Answer | None = None
    evaluation: Evaluation | None = None
    """The newest."""
    last_step_at: float | None = None
    typical_step_s: float | None = None
    """Median of recent undisturbed steps."""
    recent_step_s: tuple[float, ...] = ()
    checkpoint: CheckpointRef | None = None
    """The newest that is believed."""
    older: tuple[CheckpointRef, ...] = ()
    """Those before it that are kept, newest first."""
    after: Mapping[Step, After] = field(default_factory=dict)
    """Of the latest steps that are to be saved and whose checkpoint is not committed yet."""
    canary: Canary | None = None
    condemned: Mapping[str, float] = field(default_factory=dict)
    """Packs that are to go, and since when: wall clock."""
    distrusted: int = 0
    """Checkpoints in a row that could be read and were not what was saved."""
    void: Generation = Generation(0)
    """The last one of which nothing counts, because what it was restored from was not what was saved."""
    doubted: Generation = Generation(0)
    """The newest one whose memory is not believed, until a later one trains: by then nobody has that any more."""
    save_asked: Step | None = None
    """A person wants a checkpoint of a later step than this one."""
    save_told: Generation = Generation(0)
    """The one that was told so."""
    save_failures: int = 0
    """How often it came to nothing, in a row."""
    save_rests: bool = False
    """It came to nothing in the generation that was told, which is told again after a while."""
    saving: Mapping[Step, tuple[ShardRef, ...]] = field(default_factory=dict)
    """Shards of checkpoints that are not committed yet."""
    pacing: Pacing | None = None
    """What is saved how often; None until it differs from what the job's file says."""
    pacing_told: Generation = Generation(0)
    """The one that saves so."""
    adrift: Step | None = None
    """Of this generation: journal entries from this step on have nothing to go on from, until a base is saved."""
    base_asked: Step = Step(0)
    """What was committed when a base was last asked for because of that."""
    complained: Step = Step(0)
    """The step of which people were told last that its journal entry could not be saved."""
    costs: tuple[SaveCost, ...] = ()
    """Of the latest saves of either kind, each oldest first."""
    num_costs: int = 0
    """How many there have been."""
    num_weighed: int = 0
    """And up to which of them what is saved how often has been weighed."""
    copies: Mapping[NodeId, tuple[Copying, ...]] = field(default_factory=dict)
    """Those that last, as each host told last."""
    unsaved: tuple[Step, ...] = ()
    """Of this generation's newest, those that will have no checkpoint because a part could not be written."""
    plans: Mapping[Generation, Plan] = field(default_factory=dict)
    """Of the generations whose state may still be in somebody's memory."""
    hosts: frozenset[NodeId] = frozenset()
    """Nodes on which a host of this job has been asked for and not yet closed."""
    warm: frozenset[NodeId] = frozenset()
    """Hosts whose zygote is ready to fork."""
    unreachable: frozenset[NodeId] = frozenset()
    """Hosts that have not answered lately; no evidence that they failed."""
    planning: bool = False
    """A plan has been asked for and not answered."""
    considered: frozenset[Device] = frozenset()
    """Devices the last plan was chosen from; another is asked for only when one more is usable."""
    target: Plan | None = None
    """A larger plan whose hosts are being warmed while the job trains on."""
    join: Join | None = None
    """Under way towards `target`."""
    stragglers: Mapping[Device, Straggler] = field(default_factory=dict)
    """Devices that are slow, or were not long ago."""
    rebalance: Rebalance | None = None
    """A change of shares, until it is known what it came to."""
    rebalanced_at: tuple[float, ...] = ()
    """Wall clock of such changes within the last hour."""
    is_rebalanced: bool = False
    """Its plan may be one made for a device that was slow."""
    balance_told_at: float = 0.0
    """Wall clock of when people were told last why nothing is changed."""
    reserved: Generation = Generation(0)
    """The newest number that names a join; the next generation's is higher."""
    joins_failed: int = 0
    """In a row."""
    avoided: frozenset[NodeId] = frozenset()
    """Nodes not to plan with for now: their host was given up and is being closed, or could not be started."""
    pids: Mapping[Device, int] = field(default_factory=dict)
    ending: Mapping[Device, int] = field(default_factory=dict)
    """Processes that are known to have ended, and not yet how."""
    listeners: Mapping[Device, str] = field(default_factory=dict)
    """host:port of each of these processes, for as long as it lives."""
    spares: Mapping[NodeId, Spare] = field(default_factory=dict)
    """Nodes outside the plan that stand by."""
    at_risk: str = ""
    """Why one more failure could cost committed steps; empty where every interval has two holders apart."""
    incidents: tuple[Incident, ...] = ()
    injected: tuple[Injected, ...] = ()
    """Faults on purpose, oldest first; the last of them are kept."""
    next_fault: int = 1
    failures_in_a_row: int = 0
    """Generations closed by a fault since the last committed step."""
    failures: tuple[Failure, ...] = ()
    """Those, oldest first, and earlier ones whose step has not been made since."""
    next_effect: int = 1
    exact_on: str = ""
    """What an exact job's bits belong to: the tp degree and the kinds of device of its latest plan."""
    outbox: Mapping[EffectId, Effect] = field(default_factory=dict)
    """Effects committed and not yet known to have been carried out."""
    archived_at: float | None = None
    """Since when its history, steps and logs are gone and this record is short; None while they are there."""
    started_at: float | None = None
    paused_s: float = 0.0
    """For which its owner had it paused, restarts included."""
    paused_since: float | None = None
    """And since when, until it trains again."""
    looking: Looking | None = None
    looks: int = 0
    """How often hosts were asked to look around."""
    false_alarms: int = 0
    """Looks that found nothing standing still."""
    lost_links: tuple[tuple[Device, Device], ...] = ()
    """Pairs between which messages were lost, oldest first."""
    links_lost_at: float = 0.0
    """Wall clock of the last of them: after an hour without another they are forgotten."""
    bad_ends: Mapping[NodeId, int] = field(default_factory=dict)
    """Nodes that were given up because of their links, and how often; forgotten after an hour in which no link was lost."""
    barred: frozenset[NodeId] = frozenset()
    """Those of them that are not used for a while, however well they answer."""

    def changed(self, changes: Mapping[str, object]) -> JobRecord:
        """What dataclasses.replace gives, in a twentieth of the time: one event changes a record many times.

        Raises TypeError for a field that there is not.
        """
        if not changes.keys() <= self.__dict__.keys():
            raise TypeError(f"a job's record has no {', '.join(sorted(changes.keys() - self.__dict__.keys()))}")
        made = object.__new__(JobRecord)
        made.__dict__.update(self.__dict__)
        made.__dict__.update(changes)
        return made

    def paused_until(self, now: float) -> float:
        """Seconds in which nothing was wanted of it."""
        return self.paused_s + (max(0.0, now - self.paused_since) if self.paused_since is not None else 0.0)

    def queued_until(self, now: float) -> float:
        """Seconds for which it was put aside for others."""
        turn = self.turn
        return turn.queued_s + (max(0.0, now - turn.queued_since) if turn.queued_since is not None else 0.0)

    def held_until(self, now: float) -> float:
        """Seconds on devices, starting and recovering included."""
        turn = self.turn
        return turn.held_s + (max(0.0, now - turn.held_since) if turn.held_since is not None else 0.0)

    @property
    def priority(self) -> int:
        return self.spec.priority if self.turn.priority is None else self.turn.priority

    @property
    def wanted_size(self) -> Size:
        return self.size or Size.of(self.spec)

    @property
    def sized_spec(self) -> JobSpec:
        """What plans are chosen by."""
        return self.wanted_size.within(self.spec)
