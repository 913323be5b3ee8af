"""One value of every kind that is stored or sent, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.checkpoint import CheckpointRef, ShardRef
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import (
    AddNode,
    CallHost,
    ChoosePlan,
    CommitCheckpoint,
    Effect,
    KillNode,
    ProbeProgram,
    Sabotage,
)
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointNow,
    Contact,
    DeadlinePassed,
    EffectDone,
    HistoryEntry,
    HostClosed,
    HostHeard,
    HostLost,
    HostSaid,
    Input,
    JobSubmitted,
    NodeRequested,
    NodesSeen,
    PlanChosen,
    ProgramProbed,
    ProgramRefused,
    StepRecord,
)
from orchestrator.domain.failure import Cause, Failure, Fault
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.generation import Answer, Arrived, Held, RankReport, Settlement
from orchestrator.domain.host_events import (
    Envelope,
    FaultCarriedOut,
    HostEvent,
    HostFailed,
    HostOpened,
    JoinerAt,
    JoinFailed,
    RankEnding,
    RankExited,
    RankFinished,
    RankReady,
    RankReported,
    RanksSeen,
    RanksStalled,
    SeatsPrepared,
    ShardNotSaved,
    ShardSaved,
    StepsPassed,
)
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Rank, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord, Looking
from orchestrator.domain.layout import Move
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed, Read, Restore
from orchestrator.domain.plan import Infeasible, Pipeline, Plan, Stage
from orchestrator.domain.profile import Divisor, Interval, Line, Profile
from orchestrator.domain.requests import (
    BeginJoin,
    CloseGeneration,
    CloseHost,
    EndJoin,
    FormGeneration,
    HostRequest,
    InjectFault,
    KillRank,
    LookAround,
    OpenHost,
    PrepareSeats,
    SaveSoon,
    StopAfter,
)
from orchestrator.domain.sight import Phase, RankSight, Traffic
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec
from orchestrator.domain.state import (
    Cancelled,
    Closing,
    Failed,
    Forming,
    JobState,
    Join,
    Probing,
    Queued,
    Reforming,
    Running,
    Starting,
    Stopping,
    Succeeded,
)

JOB = JobId("job-01jd0000000000000000000000")
NODE, OTHER = NodeId("a100-1"), NodeId("b200-1")
D0, D1, D2 = Device(NODE, 0), Device(NODE, 1), Device(OTHER, 0)
G1, G2 = Generation(1), Generation(2)
AT = 1_790_000_000.25

SPEC = JobSpec(
    name="byte-gpt",
    program="causal_lm",
    data=DataSpec(files=("{stdlib}/*.py", "notes/*.md"), max_bytes=1 << 20),
    train=TrainSpec(steps=200, micro_batches=8, micro_batch_size=2, sequence=128, dtype="bf16"),
    model={"layers": 4, "tied": True, "theta": 1e4, "name": "ü"},
    parallel=ParallelSpec(tp=2, dp=2),
    checkpoint=CheckpointSpec(every=10),
    recovery=RecoverySpec(backend="gloo"),
    labels={"team": "a"},
)
PROFILE = Profile(
    num_layers=3,
    lines=(
        Line(name="embed", shape=(256, 64), split=True, layers=(0, 2), decay=True),
        Line(name="norm", shape=(64,), split=False, layers=(1,), decay=False),
    ),
    divisors=(Divisor(field="model.heads", value=4),),
    activation_bytes=4096,
)
PLAN = Plan(
    pipelines=(
        Pipeline(
            stages=(Stage(first=0, last=1, devices=(D0,)), Stage(first=1, last=3, devices=(D1,))), micro_batches=(0, 1, 2)
        ),
        Pipeline(stages=(Stage(first=0, last=3, devices=(D2,)),), micro_batches=(3,)),
    ),
    reason="as many devices as there are",
)
ANSWER = Answer(step=Step(41), norm=0.1, losses=(1.1, 2.2, 3.3, 1e-9))
REPORT = RankReport(
    device=D0,
    generation=G1,
    voted=Step(42),
    answer=ANSWER,
    held=Held(generation=G1, step=Step(41)),
    lost_peer=Rank(2),
    cause="connection reset by rank 2",
)
TOLD_REPORTS: tuple[RankReport, ...] = (replace(REPORT, answered_in=G1), replace(REPORT, answered_in=Generation(0)))
DEAD = RankReport(device=D2, generation=G1, voted=Step(41), answer=None, held=None)
CHECKPOINT = CheckpointRef(step=Step(40), generation=G1, path="/state/jobs/j/checkpoints/step-00000040.g1")
SHARD = ShardRef(device=D1, index="d1.json", sha256="ab" * 32)
MOVE = Move(Interval("embed", 0, 8192), D0, D2)
FAILURES = (
    Failure(
        fault=Fault(cause=Cause.RANK_LOST, message="raised E: 3", at=AT, devices=(D2,), signature="E: #"),
        generation=G1,
        step=Step(42),
        was_formed=True,
        ranks=("rank 2 on b/0",),
        has_committed=True,
        counts=False,
    ),
)
FAULT = Fault(cause=Cause.RANK_LOST, message="rank 2 was killed", at=AT, devices=(D2,))
FORMING = Forming(
    generation=G2,
    plan=PLAN,
    addresses={D0: "127.0.0.1:4001", D2: "127.0.0.1:4002"},
    formed=True,
    ready=frozenset({D0, D1}),
)
SETTLEMENT = Settlement(generation=G1, step=Step(41), answer=ANSWER, holders=((D0, G1), (D1, G1)))
CLOSING = Closing(generation=G1, awaited=frozenset({D1}), reports={D0: REPORT, D2: DEAD}, settlement=SETTLEMENT)

STATES: tuple[JobState, ...] = (
    Probing(),
    Queued(reason="needs 8 devices, 6 usable"),
    Starting(forming=FORMING),
    Running(generation=G1, plan=PLAN),
    Reforming(
        fault=FAULT,
        closing=CLOSING,
        forming=FORMING,
        lost=frozenset({D2}),
        attempt=2,
        waiting="needs 8 devices, 6 usable",
    ),
    Stopping(outcome=Cancelled(at=AT), open_hosts=frozenset({NODE})),
    Succeeded(at=AT),
    Failed(at=AT, message="ValueError: no", device=D0, exit_code=-9, log_tail=("Traceback", "ValueError: no")),
    Cancelled(at=AT),
)

RESTORES = (FromSeed(), FromCheckpoint(checkpoint=CHECKPOINT), FromMemory(step=Step(41), answer=ANSWER, moves=(MOVE,)))

# Of an exact job: answers with maxima, and a checkpoint that kept one.
EXACT_ANSWER = replace(ANSWER, maxima=(0.25, 1e-30))
EXACT_RESTORES = (
    FromCheckpoint(checkpoint=replace(CHECKPOINT, answer=replace(EXACT_ANSWER, step=Step(40)))),
    FromMemory(step=Step(41), answer=EXACT_ANSWER, moves=(MOVE,)),
)
MIXED_RESTORES: tuple[Restore, ...] = (
    FromMemory(
        step=CHECKPOINT.step,
        answer=ANSWER,
        moves=(MOVE,),
        checkpoint=replace(CHECKPOINT, local=(NODE,)),
        reads=(Read(MOVE.interval, D2),),
    ),
)

REQUESTS: tuple[HostRequest, ...] = (
    OpenHost(job=JOB, node=NODE, num_devices=2, spec=SPEC, profile=PROFILE, checkpoint_dir="/state/c", log_dir="/state/l"),
    PrepareSeats(generation=G2, devices=(D0, D1)),
    *(
        FormGeneration(
            generation=G2, plan=PLAN, addresses={D0: "127.0.0.1:1"}, restore=restore, committed=Step(41), donors=(D1,)
        )
        for restore in RESTORES
    ),
    CloseGeneration(generation=G1),
    KillRank(device=D1),
    CloseHost(),
)

HOST_EVENTS: tuple[HostEvent, ...] = (
    HostOpened(seconds=1.5),
    SeatsPrepared(generation=G2, addresses={D0: "127.0.0.1:1"}, pids={D0: 4242}),
    RankReported(report=REPORT),
    RankExited(device=D2, pid=7, exit_code=-9, report=DEAD, log_tail=("last line",), seconds_ago=0.25),
    RankReady(device=D0, generation=G2, phases={"fork": 0.008, "form": 0.013}),
    StepsPassed(generation=G1, answers=(ANSWER, ANSWER), at=(AT, AT + 1)),
    ShardSaved(generation=G1, step=Step(40), shard=SHARD),
    RankFinished(device=D0, generation=G1, step=Step(200)),
    HostFailed(message="the zygote ended with exit code 1", log_tail=("ImportError",)),
)
ENVELOPES = tuple(Envelope(number=number, event=event) for number, event in enumerate(HOST_EVENTS, start=1))

# Kinds that came later have files of their own: what is in one is never changed.
SIGHT = RankSight(
    device=D0,
    generation=G1,
    phase=Phase.COMPUTE,
    step=Step(42),
    still_s=1.5,
    in_wait=True,
    group="pp[0,1]",
    members=(Rank(0), Rank(1)),
    collective=77,
    traffic={Rank(1): Traffic(sent=5, received=4, awaits=True)},
    why="has waited 1.5 s, longer than 1.0 s",
)
LOOKING_REQUESTS: tuple[HostRequest, ...] = (
    LookAround(generation=G1, number=3),
    KillRank(device=D1, why="hangs", dump=True, pid=4242, mark=SIGHT.mark),
)
LOOKING_EVENTS: tuple[HostEvent, ...] = (
    RanksStalled(generation=G1, sights=(SIGHT,), why="a100-1/0 has waited 1.5 s"),
    RanksSeen(generation=G1, number=3, sights=(SIGHT,), looked_s_ago=0.1),
    RankExited(device=D2, pid=7, exit_code=-9, report=DEAD, stack=("process 7: state T (stopped)", "Thread 0x1")),
)
LOOKING_RECORDS: tuple[JobRecord, ...] = (
    JobRecord(
        id=JOB,
        spec=SPEC,
        state=Running(generation=G1, plan=PLAN),
        created_at=AT,
        incidents=(Incident(number=1, fault=FAULT, generation=G1, stack=("Thread 0x1",)),),
        looking=Looking(
            generation=G1, number=3, asked=frozenset({NODE}), why="still", seen={NODE: (SIGHT,)}, suspected=("Circle", "x")
        ),
        looks=3,
        false_alarms=1,
        lost_links=((D0, D2),),
    ),
)

EFFECTS: tuple[Effect, ...] = (
    ProbeProgram(job=JOB, spec=SPEC),
    ChoosePlan(job=JOB, generation=G2, spec=SPEC, profile=PROFILE, devices=((D0, "A100"), (D2, "B200")), keep=(D0,)),
    *(CallHost(job=JOB, node=NODE, request=request) for request in REQUESTS),
    CommitCheckpoint(job=JOB, step=Step(40), generation=G1, shards=(SHARD,), spec=SPEC, profile=PROFILE),
    KillNode(node=OTHER),
    AddNode(kind="H100", num_devices=2),
)

NODES = (
    Node(id=NODE, kind="A100", num_devices=2, labels={"zone": "z"}),
    Node(id=OTHER, kind="B200", num_devices=2, status=NodeStatus.LOST),
)

INPUTS: tuple[Input, ...] = (
    JobSubmitted(job=JOB, spec=SPEC, at=AT),
    CancelRequested(job=JOB),
    FaultRequested(fault=FaultKind.KILL, job=JOB, rank=3),
    FaultRequested(fault=FaultKind.NODE_KILL, node=NODE),
    NodeRequested(kind="H100", num_devices=2),
    ProgramProbed(job=JOB, profile=PROFILE),
    ProgramRefused(job=JOB, message="heads 5 is not divisible by tp 2"),
    PlanChosen(job=JOB, generation=G2, result=PLAN),
    PlanChosen(job=JOB, generation=G2, result=Infeasible(reason="needs 8 devices, 6 usable", forever=False)),
    CheckpointCommitted(job=JOB, checkpoint=CHECKPOINT),
    CheckpointFailed(job=JOB, step=Step(40), message="no space left"),
    *(HostSaid(job=JOB, node=NODE, event=event) for event in HOST_EVENTS),
    HostLost(job=JOB, node=NODE, contact=Contact.GONE, message="its process has ended"),
    HostClosed(job=JOB, node=NODE),
    NodesSeen(nodes=NODES),
    EffectDone(job=JOB, effect=EffectId("job:7")),
    DeadlinePassed(job=JOB, key="closing:1"),
)

HISTORY = (
    HistoryEntry(
        job=JOB,
        at=AT,
        type="recovered",
        message="generation 2 trains",
        status="RUNNING",
        generation=G2,
        step=Step(41),
        data={"pause_s": 0.12, "lost": ["b200-1/0"], "nested": {"a": None, "b": True}},
    ),
)
STEP_RECORDS = (StepRecord(job=JOB, generation=G1, at=AT, answer=ANSWER, tokens=2048, seconds=0.2),)

RECORDS: tuple[JobRecord, ...] = tuple(
    JobRecord(
        id=JOB,
        spec=SPEC,
        state=state,
        created_at=AT,
        profile=PROFILE,
        generation=G2,
        committed=Step(41),
        last_answer=ANSWER,
        last_step_at=AT + 9,
        typical_step_s=0.2,
        recent_step_s=(0.2, 0.21),
        checkpoint=CHECKPOINT,
        saving={Step(50): (SHARD,)},
        plans={G1: PLAN},
        hosts=frozenset({NODE, OTHER}),
        warm=frozenset({NODE}),
        unreachable=frozenset({OTHER}),
        planning=True,
        considered=frozenset({D2, D0}),
        target=PLAN,
        avoided=frozenset({OTHER}),
        pids={D0: 10, D1: 11},
        listeners={D0: "127.0.0.1:4001"},
        incidents=(
            Incident(
                number=1,
                fault=FAULT,
                generation=G1,
                next_generation=G2,
                decision="replace rank 2",
                source="memory",
                committed=Step(41),
                moved_elements=8192,
                phases={"detect": 0.016},
                pause_s=0.12,
                closed_at=AT,
            ),
        ),
        failures_in_a_row=1,
        next_effect=len(EFFECTS) + 1,
        outbox={EffectId(f"e{n}"): effect for n, effect in enumerate(EFFECTS)},
        started_at=AT,
    )
    for state in STATES
)

# --- kinds that came later, each in a golden file of its own --------------------------------------------------------------

REQUESTED = FaultRequested(
    fault=FaultKind.KILL, job=JOB, device=D1, at="after_vote", step=Step(31), duration_s=1.5, seed=7, id="f3"
)
FAULTS = (
    InjectFault(fault=REQUESTED, device=D1),
    FaultCarriedOut(id="f3", message="killed at after_vote of step 31", at=AT, step=Step(31)),
    Sabotage(fault=FaultRequested(fault=FaultKind.CLOCK_JUMP, jump_s=-30.0)),
    Injected(
        id="f3",
        asked=REQUESTED,
        asked_at=AT,
        devices=(D1,),
        carried_out_at=AT + 1,
        step=Step(31),
        message="killed",
        incident=4,
        cause="rank_lost",
        detected_s=0.016,
        pause_s=0.2,
        verdict=Verdict.RECOVERED,
        why="the rank was killed",
    ),
)
JOINS: tuple[BeginJoin | StopAfter | EndJoin | JoinerAt | JoinFailed | Join | RankReport | Settlement, ...] = (
    BeginJoin(generation=G2, of=G1, plan=PLAN, moves=(MOVE,), addresses={D2: "127.0.0.1:4003"}, attempt=1),
    StopAfter(generation=G1),
    EndJoin(generation=G2),
    JoinerAt(device=D2, generation=G2, step=Step(44)),
    JoinFailed(device=D2, generation=G2, source=D0, attempt=1, message="a/0 broke off: end of file"),
    Join(
        generation=G2,
        plan=PLAN,
        addresses={D2: "127.0.0.1:4003"},
        moves=(MOVE,),
        attempt=1,
        broken=frozenset({D1}),
        done=frozenset({D2}),
        begun=True,
        stopping=True,
    ),
    replace(REPORT, arrived=Arrived(step=Step(41), intervals=(MOVE.interval,)), stopped=True),
    replace(SETTLEMENT, arrived=((D2, (MOVE.interval,)),)),
)
# A job that begins with a checkpoint.
STARTS = (ProgramProbed(job=JOB, profile=PROFILE, start=CHECKPOINT),)
# A checkpoint that a person asks for.
ASKED: tuple[object, ...] = (CheckpointNow(job=JOB), SaveSoon(generation=G1, device=D1))
HEARD = (HostHeard(job=JOB, node=NODE),)
ENDINGS: tuple[HostEvent, ...] = (RankEnding(device=D2, pid=7, report=DEAD),)
SAVINGS = (ShardNotSaved(device=D1, generation=G1, step=Step(40), message="[Errno 28] No space left on device"),)
LATER: tuple[object, ...] = (*SAVINGS, *ASKED, *ENDINGS, *FAULTS, *HEARD, *LOOKING_REQUESTS, *LOOKING_EVENTS, *JOINS)
