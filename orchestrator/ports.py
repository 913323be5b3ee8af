"""The outside world as the supervisor and the API see it. Adapters implement these; nobody else touches Redis or Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from .domain.access import AuditEntry, Submitter, Token
from .domain.admission import Admission, Checked
from .domain.attic import Retention, Retired
from .domain.checkpoint import CheckpointRef
from .domain.cluster import Node
from .domain.cordon import Cordon
from .domain.effects import ChoosePlan, CommitCheckpoint, OnDisk
from .domain.events import CheckpointsPruned, Command, HistoryEntry, StepRecord
from .domain.foresight import ClusterSketch, Forecast
from .domain.host_events import Envelope
from .domain.ids import EffectId, JobId, NodeId, Term
from .domain.job import JobRecord
from .domain.memo import Kept, Reign
from .domain.plan import Infeasible, Plan
from .domain.profile import Profile
from .domain.quarantine import Quarantine
from .domain.queue import Project, Waiting
from .domain.requests import HostMessage
from .domain.secrecy import Veil
from .domain.spec import JobSpec

# --- state ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One atomic write: all of it, or StaleTerm and none of it."""

    jobs: Mapping[JobId, JobRecord] = field(default_factory=dict)
    history: tuple[HistoryEntry, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    nodes: tuple[Node, ...] | None = None
    """The cluster's projection for readers, when it changed."""
    quarantine: tuple[Quarantine, ...] | None = None
    """All that is held against any device, when it changed."""
    cordons: tuple[Cordon, ...] | None = None
    """All of them, when one changed."""
    admissions: tuple[Admission, ...] | None = None
    """Likewise."""
    projects: tuple[Project, ...] | None = None
    """All of them, when one changed."""
    queue: tuple[Waiting, ...] | None = None
    """Who waits and why, as readers see it, when that changed."""
    reigns: tuple[Reign, ...] | None = None
    """Of a store that went back, which has with this all that was forgotten: those that led here, the one that writes last.

    Its `commits` says how many there had been; more than the store knows of are no reason not to write."""
    cursor: str | None = None
    """Commands up to and including this one have been taken into account."""

    @property
    def is_empty(self) -> bool:
        kept = (self.nodes, self.quarantine, self.cordons, self.projects, self.queue, self.admissions, self.cursor)
        return not (self.jobs or self.history or self.steps or any(one is not None for one in kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    jobs: Mapping[JobId, JobRecord]
    cursor: str
    commits: int = 0
    """How many the store has ever had, as far as it knows."""
    quarantine: tuple[Quarantine, ...] = ()
    cordons: tuple[Cordon, ...] = ()
    admissions: tuple[Admission, ...] = ()
    projects: tuple[Project, ...] = ()
    reigns: tuple[Reign, ...] = ()
    """Of the latest supervisors, the newest last."""


class StateStore(Protocol):
    """The supervisor's side of the store."""

    async def acquire(self, holder: str, ttl_s: float, *, by: str = "", at: float = 0.0) -> Term | None:
        """A new, higher term for `holder` if nobody holds the lease (or it ran out); None while another does.

        by, at: of the reign that begins with it.
        """
        ...

    async def renew(self, holder: str, term: Term, ttl_s: float) -> bool: ...

    async def release(self, holder: str, term: Term) -> None: ...

    async def load(self) -> Loaded:
        """Every job that is not terminal, and the command cursor."""
        ...

    async def over(self, jobs: Collection[JobId]) -> frozenset[JobId]:
        """Of these, the jobs that have ended here. Raises Unavailable."""
        ...

    async def overtake(self, holder: str, term: Term, above: Term, ttl_s: float) -> Term | None:
        """A new term for who holds `term`, higher than `above` too.

        For a store that has gone back. None, and nothing is changed, where another holds the lease or has had a term above
        `term`. Raises Unavailable.
        """
        ...

    async def commit(self, term: Term, commit: Commit) -> int:
        """How many commits the store has had with this one.

        Raises StaleTerm, WentBack where the store has forgotten what it had confirmed to this object, and Unavailable when
        it cannot be written (nothing was, or it is safe to repeat). A terminal job is never overwritten: such a write is
        refused whole with Conflict.
        """
        ...

    async def retire(self, term: Term, now: float, retention: Retention) -> Retired:
        """Archive and forget finished jobs whose time has come, some at a time. now: wall clock.

        Raises StaleTerm, Unavailable.
        """
        ...

    async def commands(self, after: str, wait_s: float) -> Sequence[tuple[str, Command]]:
        """Commands after a cursor, oldest first; waits up to wait_s when there are none."""
        ...


class Sort(StrEnum):
    """Orders in which a page's end stays where it was whatever happens meanwhile: by instants that never change."""

    NEWEST = "-created_at"
    OLDEST = "created_at"
    LAST_FINISHED = "-finished_at"
    FIRST_FINISHED = "finished_at"
    """By their end, and so only jobs that are over."""

    @property
    def is_descending(self) -> bool:
        return self.value.startswith("-")

    @property
    def is_of_finished(self) -> bool:
        return self in (Sort.LAST_FINISHED, Sort.FIRST_FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    jobs: tuple[JobRecord, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The reader fell behind the stream's cap: entries before `resumes_at` are gone."""

    resumes_at: str


class Desk(Protocol):
    """The API's side of the store: atomic commands in, projections out. Never Ray."""

    async def submit(
        self, job: JobId, spec: JobSpec, at: float, key: str | None, body_hash: str, by: Submitter | None = None
    ) -> tuple[JobId, bool]:
        """Record a new job and its command at once; (id, False) where `key` was used before with the same body.

        Raises Conflict where the key was used with another body, Unavailable.
        """
        ...

    async def command(self, command: Command, expected: int | None = None) -> str:
        """Record it for the supervisor. expected: the job's revision it rests on; where that is another by now, nothing is.

        Raises Outdated, Unavailable.
        """
        ...

    async def revision(self, job: JobId) -> int:
        """See domain/revision.py; 0 where there is no such job. Ask before the record: a record is then never older.

        While something is asked of the job and not in its record yet, one that is outdated already: whoever looks then has
        not seen what will be.
        """
        ...

    async def get(self, job: JobId) -> JobRecord:
        """Raises NotFound."""
        ...

    async def list(self, limit: int, cursor: str | None, sort: Sort = Sort.NEWEST) -> Page:
        """Raises Refused for a cursor that is none of this order."""
        ...

    async def count(self) -> int | None:
        """How many jobs there are; None where that takes looking at each."""
        ...

    async def nodes(self) -> tuple[Node, ...]: ...

    async def quarantine(self) -> tuple[Quarantine, ...]: ...

    async def cordons(self) -> tuple[Cordon, ...]: ...

    async def admissions(self) -> tuple[Admission, ...]: ...

    async def projects(self) -> tuple[Project, ...]:
        """Those whose quota was ever set."""
        ...

    async def queue(self) -> tuple[Waiting, ...]:
        """Who waits, the next one first; the first thousand of them."""
        ...

    async def history(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, HistoryEntry | Gap]]: ...

    def follow(self, job: JobId, after: str) -> AsyncIterator[tuple[str, HistoryEntry | StepRecord | Gap]]:
        """History and steps as they happen, oldest first, after an id ("0": from the beginning); never ends by itself."""
        ...

    async def steps(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, StepRecord]]: ...

    async def health(self) -> dict[str, str]:
        """Name of each check -> "ok" or what is wrong, in words."""
        ...


class Vault(Protocol):
    """Where the values are that jobs name, for hiding them."""

    def veil(self, spec: JobSpec) -> Veil:
        """Over the job's secrets, as far as they can be read."""
        ...


MAX_PASSES = 100
"""Sessions, and login codes, that one token has at a time."""


class Keyring(Protocol):
    """Who may speak to the API, and what they asked for. Only hashes of what people hold are ever given to it.

    Every method raises Unavailable where the store does not answer.
    """

    async def add_token(self, token: Token) -> None:
        """Raises Conflict where there are too many."""
        ...

    async def tokens(self) -> tuple[tuple[Token, float | None], ...]:
        """Oldest first, those revoked lately included; each with the instant it was used last."""
        ...

    async def token(self, id: str) -> Token | None: ...

    async def token_with(self, digest: str) -> Token | None:
        """Revoked and expired ones too."""
        ...

    async def revoke(self, id: str, at: float) -> Token:
        """Raises NotFound; twice is no error."""
        ...

    async def note_use(self, id: str, at: float) -> None: ...

    async def add_pass(self, kind: str, digest: str, holder: str, ttl_s: int) -> None:
        """Let whoever shows what hashes to `digest` be `holder` for so long. kind: session, code.

        Of one kind a holder has MAX_PASSES at most: the oldest ends for one more.
        """
        ...

    async def pass_of(self, kind: str, digest: str, *, once: bool = False) -> str | None:
        """Its holder; with `once` it is good for nobody after this."""
        ...

    async def end_pass(self, kind: str, digest: str) -> None: ...

    async def record(self, entry: AuditEntry) -> None: ...

    async def audit(self, limit: int, before: str | None) -> tuple[tuple[str, AuditEntry], ...]:
        """Newest first, older than the entry with id `before`."""
        ...


# --- cluster -------------------------------------------------------------------------------------------------------------


class HostGone(Exception):
    """Positive evidence: the host's process has ended."""


class HostUnreachable(Exception):
    """Nobody answered; the host may be alive."""


class Cluster(Protocol):
    """Nodes and the hosts on them."""

    async def nodes(self) -> tuple[Node, ...]:
        """Every node known, lost ones included for a while."""
        ...

    async def call(
        self, job: JobId, node: NodeId, term: Term, effect: EffectId, request: HostMessage, memo: str = ""
    ) -> None:
        """Deliver a request; OpenHost creates the host where there is none, CloseHost ends it (no host: no error).

        memo: an encoded Memo that the host keeps before it does anything, in place of the one it has; "": it keeps that.

        Raises HostGone, HostUnreachable, StaleTerm.
        """
        ...

    async def hosts(self) -> tuple[tuple[JobId, NodeId], ...]:
        """Every host there may be, whoever asked for it. Raises Unavailable."""
        ...

    async def ask(self, job: JobId, node: NodeId) -> Kept:
        """What a host remembers; nothing is asked of it and no term is shown. Raises HostGone, HostUnreachable."""
        ...

    async def poll(
        self, job: JobId, node: NodeId, term: Term, after: int, acked: int, wait_s: float, memo: str = ""
    ) -> tuple[Envelope, ...]:
        """Events numbered above `after`; those up to `acked` are recorded and may be forgotten. memo: see call.

        Returning at all is the heartbeat. Raises HostGone, HostUnreachable, StaleTerm.
        """
        ...


class NodeProvider(Protocol):
    """Where nodes come from."""

    async def add(self, kind: str, num_devices: int, labels: Mapping[str, str] | None = None) -> NodeId: ...

    async def kill(self, node: NodeId) -> None:
        """End every process of the node at once, without warning. Raises NotFound."""
        ...

    async def check(self, node: NodeId, peer: NodeId | None) -> Checked:
        """Whether the node is fit to be used, in a few seconds. Raises NotFound, Unavailable where nobody answers."""
        ...


class Saboteur(Protocol):
    """Faults of the control plane, on purpose. Only where the deployment allows them."""

    async def kill_supervisor(self) -> None:
        """End the supervisor that asks, at once and without a word."""
        ...

    async def stall_store(self, seconds: float) -> None:
        """Have the store answer nobody for this long. Raises Unavailable."""
        ...


# --- work that is not the kernel's ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """start: the checkpoint that the job asked to begin with, known to fit; None for its seed."""

    profile: Profile
    start: CheckpointRef | None = None


class Prober(Protocol):
    async def probe(self, spec: JobSpec) -> Probed:
        """Import and describe the program in a process of its own, and look at what it begins with. Raises Refused."""
        ...


class Planner(Protocol):
    async def choose(self, request: ChoosePlan) -> Plan | Infeasible: ...


class Foreseer(Protocol):
    async def foresee(self, spec: JobSpec, cluster: ClusterSketch) -> Forecast | Infeasible:
        """The plan a job would get there. Raises Refused where its program cannot be described."""
        ...


class Checkpoints(Protocol):
    async def commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        """Check that the shards cover every line, then write the manifest, last. Raises OSError or Refused."""
        ...

    async def keep_house(self, effect: OnDisk) -> CheckpointsPruned | None:
        """What is to be recorded of it, if anything. Raises OSError or Refused; what is to be kept is untouched then."""
        ...
