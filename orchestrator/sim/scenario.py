"""What a seed stands for: a cluster, its jobs, and which kinds of trouble they meet. Also the mathematics to expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import NodeId, Step
from orchestrator.domain.profile import Divisor, Line, Profile
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, Policy, RecoverySpec, TrainSpec


class Trouble(StrEnum):
    KILL_RANK = "kill_rank"
    KILL_VOTER = "kill_voter"
    """The first rank to see a vote pass, in that instant."""
    KILL_DONOR = "kill_donor"
    """One that gives state away, in the middle of the job's next transfer."""
    RAISE = "raise"
    """The program of a rank raises, once."""
    KILL_NODE = "kill_node"
    KILL_HOST = "kill_host"
    FAIL_HOST = "fail_host"
    FREEZE_RANK = "freeze_rank"
    FREEZE_HOST = "freeze_host"
    FREEZE_NODE = "freeze_node"
    HANG_RANK = "hang_rank"
    CUT_LINK = "cut_link"
    FALSE_ALARM = "false_alarm"
    CUT_HOST = "cut_host"
    UNPLUG = "unplug"
    """A node's only cable: neither its host nor its ranks reach anybody, and nobody is told."""
    CUT_ALL = "cut_all"
    CRASH_SUPERVISOR = "crash_supervisor"
    CRASH_AFTER_COMMIT = "crash_after_commit"
    PAUSE_SUPERVISOR = "pause_supervisor"
    STALL_STORE = "stall_store"
    FLIP_BIT = "flip_bit"
    SPOIL_GRADIENT = "spoil_gradient"
    """Found by the pipeline that computes the same micro-batch again."""
    DAMAGE_CHECKPOINT = "damage_checkpoint"
    """The newest cannot be read any more."""
    FORGE_CHECKPOINT = "forge_checkpoint"
    """The newest is read, whole, and is not what was saved."""
    NOT_FINITE = "not_finite"
    INJECT = "inject"
    """A fault on purpose, asked for through the kernel."""
    ADD_NODE = "add_node"
    RESIZE = "resize"
    """Its owner wants a job larger, smaller, or of any size again."""
    CORDON = "cordon"
    """An operator cordons a node, has it drained or taken away, or lets it be used again."""
    PAUSE = "pause"
    """A job's owner pauses it and, some time later, resumes it."""
    CANCEL = "cancel"
    SLOW = "slow"
    """A device computes for several times as long, for a while."""
    SPOIL_NODE = "spoil_node"
    """A node, one that comes or one that is there, is not fit to be used: a check shows it."""
    PRIORITY = "priority"
    """A job's owner gives it another priority, or an operator a project another quota."""
    FAIL_STORE = "fail_store"
    """For a while every other commit fails; of those that fail, every other one was written and the answer is lost."""
    CUT_POWER = "cut_power"
    """All nodes of a rack die at once."""
    FAIL_SWITCH = "fail_switch"
    """All nodes of a rack are unplugged, for a while."""
    REWIND_STORE = "rewind_store"
    """The store forgets the latest commits: a replica takes over that lacks them, or a backup is restored."""

    REWIND_UNSEEN = "rewind_unseen"
    """It does so while no supervisor lives: the next one begins with what there is."""


SOMETIMES = (
    Trouble.SLOW,
    Trouble.PRIORITY,
    Trouble.SPOIL_NODE,
    Trouble.FAIL_STORE,
    Trouble.CUT_POWER,
    Trouble.FAIL_SWITCH,
    Trouble.REWIND_STORE,
    Trouble.REWIND_UNSEEN,
)
DRAWN = tuple(trouble for trouble in Trouble if trouble not in SOMETIMES)
"""Those that any seed may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """Trouble that comes once the job has committed `step`. devices: whom it hit, where that is known: node/index."""

    step: Step
    trouble: Trouble
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """nodes: devices of each. between_s: mean time from one trouble to the next, until trouble_until_s.

    gentle: one failure at a time, each only when the job has recovered from the one before; or faults on purpose at any
    time, of which the kernel itself refuses what mirrors do not cover: nothing may be rolled back.
    """

    seed: int
    nodes: tuple[int, ...]
    jobs: tuple[JobSpec, ...]
    troubles: tuple[Trouble, ...]
    between_s: float
    trouble_until_s: float
    gentle: bool
    kinds: tuple[str, ...] = ("cpu",)
    """Nodes are of these in turn."""
    racks: int = 0
    """Nodes are dealt out to this many; 0: they have no labels."""
    failures: int | None = None
    """No more than so many troubles."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Jobs whose program raises in this step, every time: they must end there, with the verdict that says so."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """Jobs that begin with a checkpoint of another one, and the step it is of."""

    slow_reads: bool = False
    """Reading a checkpoint takes longer than a generation may take to form while nothing happens."""
    checks: bool = False
    """Nodes are checked before they are used."""
    arrive_s: float = 2.0
    """Jobs are submitted within so many virtual seconds."""
    saves: tuple[float, ...] = ()
    """When a person asks for a checkpoint of job0, in virtual seconds."""
    script: tuple[Scripted, ...] = ()
    """Of job0: its trouble, in this order and in place of what is drawn."""

    def start_of(self, job: str) -> Step:
        return Step(self.starts.get(job, 0))


def one_failure(seed: int) -> Scenario:
    """A short job that meets one failure, for a supervisor to die at any point of the recovery."""
    rng = Random(f"one failure {seed}")
    nodes = tuple(rng.choice((2, 2, 4)) for _ in range(rng.randint(3, 4)))
    return Scenario(
        seed=seed,
        nodes=nodes,
        jobs=(_job(rng, 0, sum(nodes), 24),),
        troubles=(rng.choice((Trouble.KILL_RANK, Trouble.KILL_VOTER, Trouble.KILL_NODE, Trouble.KILL_HOST)),),
        between_s=0.3,
        trouble_until_s=60.0,
        gentle=True,
        failures=1,
    )


def crowd(seed: int, steps: int | None = None) -> Scenario:
    """More jobs than fit, of different priorities and two projects, which come one after another."""
    rng = Random(f"crowd {seed}")
    nodes = tuple(rng.choice((1, 2, 2, 4)) for _ in range(rng.randint(2, 4)))
    jobs = []
    for number in range(rng.randint(3, 5)):
        drawn = rng.randint(20, 60)
        job = _job(rng, number, sum(nodes), steps or drawn)
        least = rng.randint(1, max(1, sum(nodes) // 2))
        parallel = replace(job.parallel, min_devices=least, max_devices=rng.choice((0, 0, least, least + 2)))
        if (parallel.tp or 1) > max(nodes):  # a tp group never leaves its node
            parallel = replace(parallel, tp=None)
        fits = (parallel.tp or 1) * (parallel.pp or 1) <= (parallel.max_devices or sum(nodes))
        jobs.append(
            replace(
                job,
                parallel=_possible(
                    parallel if fits else replace(parallel, tp=None, pp=None), job.train.micro_batches, max(nodes)
                ),
                priority=rng.choice((-1, 0, 0, 1, 5)),
                project=rng.choice(("default", "other")),
            )
        )
    gentle = seed % 2 == 0
    troubles: tuple[Trouble, ...] = (Trouble.PRIORITY, Trouble.RESIZE, Trouble.PAUSE, Trouble.KILL_RANK, Trouble.CORDON)
    if not gentle:
        troubles = (*troubles, Trouble.KILL_NODE, Trouble.CRASH_SUPERVISOR, Trouble.CRASH_AFTER_COMMIT, Trouble.ADD_NODE)
    return Scenario(
        seed=seed,
        nodes=nodes,
        jobs=tuple(jobs),
        troubles=(Trouble.PRIORITY,) if seed % 4 == 0 else troubles,
        between_s=rng.choice((1.0, 3.0)),
        trouble_until_s=rng.uniform(10.0, 30.0),
        gentle=gentle,
        arrive_s=rng.choice((2.0, 10.0, 20.0)),
    )


def _possible(parallel: ParallelSpec, micro_batches: int, widest: int) -> ParallelSpec:
    """With fewer devices at least, where no number that it may have is tp x pp x dp: it would wait for ever.

    widest: devices of the largest node.
    """
    known = profile()
    sizes = {
        tp * pp * dp
        for tp in ([parallel.tp] if parallel.tp else [tp for tp in (1, 2, 4) if tp <= widest])
        for pp in ([parallel.pp] if parallel.pp else range(1, known.num_layers + 1))
        for dp in range(1, micro_batches // pp + 1)
    }
    most = parallel.max_devices or max(sizes)
    return replace(parallel, min_devices=min(parallel.min_devices, max(size for size in sizes if size <= most)))


def scenario(seed: int, steps: int | None = None) -> Scenario:
    if seed % 20 == 10:
        return crowd(seed, steps)
    rng = Random(f"scenario {seed}")
    more = Random(f"racks and spares {seed}")
    gentle = rng.random() < 0.3
    nodes = tuple(rng.choice((1, 2, 2, 2, 4)) for _ in range(rng.randint(2, 5)))
    jobs = tuple(_job(rng, number, sum(nodes), steps) for number in range(rng.choice((1, 1, 1, 2))))
    jobs = tuple(replace(job, recovery=replace(job.recovery, spares=more.choice((0, 1, 1, 2)))) for job in jobs)
    if max(nodes) == 1:  # a tp group never leaves its node
        jobs = tuple(replace(job, parallel=replace(job.parallel, tp=None)) for job in jobs)
    starts = {"job0": Random(f"start {seed}").randint(1, 20)} if seed % 10 == 4 else {}
    jobs = tuple(begun_elsewhere(job) if job.name in starts else job for job in jobs)
    if seed % 10 == 6:  # what memory lacks is on disk, of the same step
        jobs = tuple(replace(job, checkpoint=replace(job.checkpoint, every=1)) for job in jobs)
    harm: tuple[Trouble, ...] = (
        Trouble.KILL_RANK,
        Trouble.KILL_VOTER,
        Trouble.KILL_NODE,
        Trouble.KILL_HOST,
        Trouble.HANG_RANK,
    )
    anything = [trouble for trouble in DRAWN if trouble is not Trouble.CANCEL or rng.random() < 0.1]
    # A subset per seed: some weaknesses only show when other troubles do not get in their way.
    if gentle and rng.random() < 0.5:
        harm = (Trouble.INJECT,)
    elif more.random() < 0.5:
        harm = (*harm, Trouble.RESIZE, Trouble.CORDON, Trouble.PAUSE)
    troubles = harm if gentle else tuple(rng.sample(anything, rng.randint(3, len(anything))))
    kinds: tuple[str, ...] = ("cpu",)
    if seed % 10 == 2:  # plans of unequal pipelines, which losses are absorbed by
        kinds = ("A100", "H100", "B200")
        jobs = tuple(replace(job, train=_as_other_kinds(job.train)) for job in jobs)
    if seed % 10 == 1:  # speeds are judged over seconds, so such jobs are longer
        troubles = (*troubles, *(Trouble.SLOW,) * len(troubles))
        jobs = tuple(replace(job, train=replace(job.train, steps=steps or 4 * job.train.steps)) for job in jobs)
    if seed % 10 == 3:  # deadlines that some meet and some do not
        due = Random(f"deadlines {seed}")
        jobs = tuple(
            replace(job, start_by_s=due.choice((0.0, 3.0, 60.0)), max_runtime_s=due.choice((0.0, 4.0, 30.0, 300.0)))
            for job in jobs
        )
    other = Random(f"store and racks {seed}")
    racks = more.choice((0, 1, 2, 3))
    if not gentle:
        share = max(1, len(troubles) // 6)
        troubles += (Trouble.FAIL_STORE,) * (share if other.random() < 0.3 else 0)
        if racks and other.random() < 0.3:
            troubles += (Trouble.CUT_POWER, Trouble.FAIL_SWITCH) * share
    checks = seed % 10 in (5, 9)
    if checks and not gentle:
        troubles = (*troubles, *(Trouble.SPOIL_NODE,) * max(1, len(troubles) // 4))
    return Scenario(
        seed=seed,
        nodes=nodes,
        kinds=kinds,
        checks=checks,
        racks=racks,
        jobs=jobs,
        troubles=troubles,
        between_s=rng.choice((0.3, 1.0, 3.0)),
        trouble_until_s=rng.uniform(6.0, 16.0),
        gentle=gentle,
        starts=starts,
        saves=tuple(Random(f"saves {seed}").uniform(1.0, 30.0) for _ in range(4)) if seed % 10 == 8 else (),
        broken={"job0": Random(f"broken {seed}").randint(3, 15)} if seed % 10 == 7 else {},
    )


def _as_other_kinds(train: TrainSpec) -> TrainSpec:
    return replace(train, emulated_layer_s=0.01, exact="best_effort" if train.exact else False)


def begun_elsewhere(job: JobSpec) -> JobSpec:
    return replace(job, checkpoint=replace(job.checkpoint, restore_from="/shared/another"))


def _job(rng: Random, number: int, devices: int, steps: int | None) -> JobSpec:
    micro_batches = rng.choice((4, 6, 8))
    tp, pp = rng.choice(((None, None), (None, None), (1, None), (2, None), (1, 2), (2, 2)))
    fits = (tp or 1) * (pp or 1) <= devices // 2
    return JobSpec(
        name=f"job{number}",
        program="causal_lm",
        data=DataSpec(files=("*.txt",)),
        train=TrainSpec(
            steps=steps or rng.randint(16, 60),
            micro_batches=micro_batches,
            micro_batch_size=1,
            sequence=8,
            seed=number,
            exact=bool(number % 2 or micro_batches == 6),
        ),
        parallel=ParallelSpec(tp=tp if fits else None, pp=pp if fits else None),
        checkpoint=_checkpoint(rng.choice((0, 5, 10, 25)), Random(f"journal {number} {micro_batches} {steps} {devices}")),
        recovery=RecoverySpec(
            max_isolation_s=rng.choice((0.0, 60.0)), max_attempts=1000, compare_every=rng.choice((0, 1, 4, 10))
        ),
    )


def _checkpoint(every: int, rng: Random) -> CheckpointSpec:
    policies: tuple[Policy, ...] = ("full", "full", "journal", "auto")
    policy = rng.choice(policies) if every else "full"
    return CheckpointSpec(every="auto" if policy == "auto" else every, policy=policy)


def profile() -> Profile:
    """Six layers, split and whole lines of uneven sizes, the head tied to the embedding."""
    lines = [Line(name="embedding", shape=(32, 8), split=True, layers=(0, 5), decay=True)]
    for layer in range(1, 5):
        lines.append(Line(name=f"{layer}.weight", shape=(16, 24), split=True, layers=(layer,), decay=True))
        lines.append(Line(name=f"{layer}.norm", shape=(40,), split=False, layers=(layer,), decay=False))
    lines.append(Line(name="norm", shape=(7,), split=False, layers=(5,), decay=False))
    return Profile(num_layers=6, lines=tuple(lines), divisors=(Divisor(field="heads", value=4),), activation_bytes=64)


def loss(spec: JobSpec, step: Step, micro_batch: int) -> float:
    """The reference: a pure function of the seed, the step and the micro-batch id, whatever the plan."""
    return (spec.train.seed * 31 + step * 7919 + micro_batch * 104729) % 10007 / 1000


def reference(spec: JobSpec, step: Step) -> Answer:
    losses = tuple(loss(spec, step, number) for number in range(spec.train.micro_batches))
    return Answer(step=step, norm=sum(losses), losses=losses, maxima=maxima(spec, step))


def maxima(spec: JobSpec, step: Step) -> tuple[float, ...]:
    """Of exact jobs: what the scale of the next step is made of."""
    return (float(step), 1.0 / step) if spec.train.exact else ()


def node_name(number: int) -> NodeId:
    return NodeId(f"n{number}")
