"""What the API answers, as typed shapes: shared by the routes that fill them and the SDK that reads them.

Instants are RFC 3339 in UTC, durations are seconds. A reader ignores fields it does not know, so that a client of this
version can speak to the next server; what users send is the strict side (schemas.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer


def _rfc3339(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Instant = Annotated[datetime, PlainSerializer(_rfc3339, return_type=str)]


class View(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, json_schema_serialization_defaults_required=True)


class SubmittedView(View):
    """The answer to a submission; a repeated key gets the same one."""

    id: str
    name: str
    created_at: Instant
    url: str
    events_url: str


class AcceptedView(View):
    """A command has been recorded; the supervisor carries it out. id: its place among the commands."""

    id: str
    message: str


class BulkView(View):
    """What a filter selected. jobs: the newest hundred of them."""

    count: int
    jobs: tuple[str, ...]
    dry_run: bool
    message: str
    refused: tuple[str, ...] = ()
    """Selected, and why not: the newest hundred of them."""


class FaultAcceptedView(AcceptedView):
    """fault: its id among the job's faults."""

    fault: str


class FaultView(View):
    """One fault on purpose and what became of it; durations are seconds, None until known."""

    id: str
    kind: str
    at: str
    seed: int
    asked: dict[str, Any]
    """The request, with every selector, to ask again."""
    asked_at: Instant
    devices: tuple[str, ...]
    node: str | None
    carried_out_at: Instant | None
    step: int
    message: str
    incident: int | None
    detected_as: str
    seen: str
    detected_s: float | None
    pause_s: float | None
    rolled_back: int
    verdict: str
    why: str

    @property
    def is_open(self) -> bool:
        return self.verdict == "open"


class SeatView(View):
    """One rank's place. layers: first and last+1."""

    rank: int
    device: str
    pipeline: int
    stage: int
    tp: int
    layers: tuple[int, int]
    pid: int | None = None


class PlanView(View):
    generation: int
    tp: int
    pp: int
    dp: int
    summary: str
    reason: str
    micro_batches: tuple[tuple[int, ...], ...]
    """Ids of each pipeline."""
    seats: tuple[SeatView, ...]


class OptionView(View):
    """One way out of a fault: price_s (seconds of training at full strength), pause_s; None where it was not possible."""

    rung: str
    why: str
    price_s: float | None
    pause_s: float | None


class SpareView(View):
    """A node that stands by. is_ready: its ranks are forked and built."""

    node: str
    devices: tuple[str, ...]
    is_ready: bool


class IncidentView(View):
    """One recovery or resize; phases and pause_s are seconds, pause_s is None until it is over."""

    number: int
    cause: str
    is_resize: bool = False
    """It was wanted, and is no recovery: the job grows, shrinks, is balanced anew, or was to pause and could not."""
    message: str
    at: Instant
    devices: tuple[str, ...]
    generation: int
    next_generation: int | None
    decision: str
    source: str
    committed: int
    rolled_back: int
    moved_elements: int
    attempts: int
    phases: dict[str, float]
    pause_s: float | None
    rung: str | None = None
    """The way out that was taken; None for a resize."""
    predicted_pause_s: float | None = None
    predicted: dict[str, float] = {}
    options: tuple[OptionView, ...] = ()
    """Every way out that was weighed, the cheapest first; of recent incidents only."""
    stack: tuple[str, ...] = ()
    """Where the process that hung and was killed for it stood."""


class CheckpointView(View):
    """A committed checkpoint. kind: base, or entry: the gradient that leads to it from the step before.

    depth: entries from its base to it, which are all read to restore it. new_bytes: what it added to the disk, total_bytes:
    what restoring it reads, seconds: what its slowest host took to write it; None where nobody measured.
    """

    step: int
    generation: int
    path: str
    kind: str = "base"
    depth: int = 0
    new_bytes: int | None = None
    total_bytes: int | None = None
    seconds: float | None = None
    at: Instant | None = None
    verified: bool = False
    """Training was restored from it, and the step after it came out as it had before."""
    tier: str = "shared"
    """Where it is: shared, the folder that every node sees; local+shared where nodes have copies on their own disks too."""
    local: tuple[str, ...] = ()
    """Those nodes; restoring there reads the copy first."""


class CopyView(View):
    """A copy of state that lasts. what: saving (to disk), restoring (from a checkpoint) or receiving (from other ranks).

    Bytes are of content; seconds: since it began.
    """

    device: str
    what: str
    step: int
    done_bytes: int
    total_bytes: int
    seconds: float
    bytes_per_s: float


class FailureView(View):
    message: str
    device: str | None
    rank: int | None
    exit_code: int | None
    log_tail: tuple[str, ...]
    verdict: str = ""
    """Which rule gave the job up: repeated_error, no_progress, out_of_attempts; empty where none did."""


class AttemptsView(View):
    """Generations in a row that one cause ended without a committed step; the job fails beyond `limit`."""

    cause: str
    is_external: bool
    used: int
    limit: int


class GoodputView(View):
    """Where a job's time went since it was submitted, in seconds; causes add up to wall_s.

    training: steps that count. start: until the first generation trained. paused: by its owner, until it trained again.
    queue: put aside for jobs of higher priority, until it trained again.
    run_again: steps that were committed and rolled back. The others are causes of incidents (rank_lost, grow, ...) with
    what their pauses cost.
    """

    wall_s: float
    causes: dict[str, float]
    share: float | None
    """training / (wall_s - start - paused - queue); None before it has started."""


class WaitingView(View):
    """One job of the queue, and why it has no devices.

    position: from 1. reason: probing, planning, making_room, busy, behind, quota, infeasible or no_cluster; message: the
    same in words. least: devices without which it does not start.
    """

    job: str
    position: int
    reason: str
    message: str
    priority: int
    project: str
    least: int
    since: Instant


class ProjectView(View):
    """max_devices: its quota, null for none. num_devices: what its jobs hold. num_waiting: of its jobs, in the queue."""

    name: str
    max_devices: int | None
    num_devices: int
    num_waiting: int


class JobSummary(View):
    """One line of a list of jobs."""

    id: str
    name: str
    status: str
    user: str | None = None
    """Name of the token it was submitted with."""
    reason: str
    generation: int
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    recoveries: int
    plan_summary: str | None
    labels: dict[str, str] = {}
    priority: int = 0
    project: str = "default"
    waiting: WaitingView | None = None
    """Its place in the queue, while it waits for devices."""
    next_action_at: Instant | None = None
    """When it is given up unless it trains by then, or is saved and ended because it has had its time; null for never."""
    archived_at: Instant | None = None
    """Since when its history, steps and logs are gone."""
    created_at: Instant
    started_at: Instant | None
    finished_at: Instant | None


class LogLineView(View):
    """at: when its node first saw it, to about a second. offset: of its first byte in the log of its device.

    rank: of the current generation; null where the device has none.
    """

    device: str
    rank: int | None
    at: Instant
    offset: int
    text: str


class LogPageView(View):
    """next: to go on with, as `after`. is_cut: more is there now; with `tail`, before these lines."""

    lines: tuple[LogLineView, ...]
    next: str
    is_cut: bool


class SizeView(View):
    """In devices; 0 for no limit."""

    min_devices: int
    max_devices: int
    target: int


class EvaluationView(View):
    """What the weights after a step make of the held-out text."""

    step: int
    loss: float | None
    """Mean of its tokens; null where that is not finite."""


class JobView(JobSummary):
    revision: int = 0
    """Grows with each thing asked of the job and each change a person would decide on; no step moves it."""
    tokens_per_step: int
    typical_step_s: float | None
    mfu: float | None = None
    """Operations of the model, 6 per parameter and token, of what its devices could do by their data sheets in bf16; null
    while it does not step, and of kinds of device that nobody knows."""
    num_params: int | None
    size: SizeView
    plan: PlanView | None
    incidents: tuple[IncidentView, ...]
    spares: tuple[SpareView, ...] = ()
    at_risk: str = ""
    """Why one more failure could cost committed steps; empty where it could not."""
    false_alarms: int = 0
    """Suspected hangs that were none."""
    copies: tuple[CopyView, ...] = ()
    """Under way for longer than a moment."""
    checkpoint: CheckpointView | None
    failure: FailureView | None
    attempts: tuple[AttemptsView, ...] = ()
    goodput: GoodputView | None = None
    evaluation: EvaluationView | None = None
    """The newest; null of a job that does not evaluate."""
    spec: dict[str, Any]
    """The job file with every default written out."""

    @property
    def is_over(self) -> bool:
        return self.status in TERMINAL

    @property
    def succeeded(self) -> bool:
        return self.status == "SUCCEEDED"


class JobPage(View):
    jobs: tuple[JobSummary, ...]
    next_cursor: str | None
    total: int | None = None
    """How many jobs are so on all pages together; only where it was asked for."""
    total_is_whole: bool = True
    """Counting ends after ten thousand jobs were looked at; false: there may be more than `total`."""


class EventView(View):
    """One entry of a job's history. id: its place in the stream, to resume after."""

    id: str
    type: str
    at: Instant
    message: str
    status: str
    generation: int
    step: int
    data: dict[str, Any]


class StepView(View):
    """One committed step. A step run again after a rollback appears again, with a later generation."""

    id: str
    step: int
    loss: float | None
    norm: float | None
    eval_loss: float | None = None
    """On held-out text, of the weights that this step began with: those after the step before. Null where none was due."""
    tokens: int
    seconds: float | None
    busy: dict[str, float] = {}
    """By device, seconds of a step in which its rank computes, waiting excluded, as ranks told lately. Of some steps only,
    about one a second; of more than 32 ranks those of the slowest and the quickest."""
    generation: int
    at: Instant


class GapView(View):
    """Entries before `resumes_at` are gone: the reader fell behind what is kept."""

    id: str
    type: str = "gap"
    resumes_at: str


class JobEventView(EventView):
    """An EventView in a stream of several jobs."""

    job: str


class JobStepView(StepView):
    """A StepView in a stream of several jobs."""

    job: str


class JobGapView(GapView):
    """A GapView in a stream of several jobs."""

    job: str


class PulseView(View):
    """Nothing may have happened; the stream is alive."""

    at: Instant


class FaultKindView(View):
    """What a kind of fault does, which fields its request needs, and which it takes besides."""

    kind: str
    words: str
    needs: tuple[str, ...]
    takes: tuple[str, ...]


class ServerView(View):
    """chaos: faults may be caused on purpose. kinds: of device -> dense bf16 TFLOP/s. points: instants for faults."""

    version: str
    chaos: bool
    kinds: dict[str, float]
    fault_kinds: tuple[FaultKindView, ...]
    points: tuple[str, ...]


class QuarantineView(View):
    """What is held against a device. standing: testing, held (until it is released) or released (a strike is kept)."""

    device: str
    standing: str
    reason: str
    since: Instant
    strikes: int
    job: str
    said: str
    """What its self-test found."""


class NodeView(View):
    id: str
    kind: str
    num_devices: int
    status: str
    address: str
    labels: dict[str, str]
    quarantine: tuple[QuarantineView, ...] = ()
    """Devices that were accused of wrong numbers; those not `released` are in no plan."""
    admission: str = "unchecked"
    """checking: it is not used before its check has come back; refused: nor after it; admitted: it is."""
    admission_reason: str = ""
    """Why it is being checked, or is refused."""
    checked: str = ""
    """What its last check tried, in words."""
    scheduling: str = "open"
    """cordoned: nothing new is placed there; draining: jobs leave it; drained: they have."""
    removed: bool = False
    """It goes once it is empty,"""
    deadline: Instant | None = None
    """or then in any case."""


TERMINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
