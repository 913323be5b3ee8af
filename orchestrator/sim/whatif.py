"""What goodput a job will have on a cluster: a scenario, the faults it meets, and what each policy makes of those faults.

`everstep` is this code base's own kernel (fleet.py). `restart` (everything again from the newest checkpoint) and `shrink`
(the data-parallel group that lost a machine is away until it has been restarted, the others go on) are models of other
systems, in a few lines each: no decision of ours is made twice. `python -m orchestrator.sim.whatif` reads scenarios as JSON
from stdin, tells its progress on stderr and prints the reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from random import Random
from typing import Any

from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.profile import BLOCK, Line, Profile
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec

from .arrivals import DAY_S, Arrival, SpotWaves, arrivals
from .fleet import Fleet, Pace

WARM_UP_S = 120.0
"""Before the first fault: hosts open and the first plan is made; not part of what is measured."""
MOST_PLANNED = 2048
"""Blocks up to which a job is planned smaller while some are away; a larger one waits for them."""
POLICIES = ("restart", "shrink", "everstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One job on one cluster. block: accelerators that are lost, replaced and planned together: a machine, or a rack.

    pp: stages of a pipeline, each on one block; params: of the model. checkpoint_every: steps. rate: how many times as
    often as in Llama 3's cluster an accelerator fails. detect_s, restart_s, requorum_s: of the other systems.
    """

    name: str
    gpus: int
    block: int = 8
    pp: int = 4
    params: float = 405e9
    step_s: float = 5.0
    days: float = 14.0
    seed: int = 0
    rate: float = 1.0
    spares: int = 1
    mirrors: int = 1
    shrinks: bool = True
    """Goes on with fewer while blocks are away and no spare is left; or waits."""
    checkpoint_every: int = 60
    checkpoint_stall_s: float = 0.0
    """For which a checkpoint keeps training waiting, under every policy."""
    policies: tuple[str, ...] = POLICIES
    device_w: float = 700.0
    pue: float = 1.1
    spot_waves_a_day: float = 0.0
    spot_blocks: int = 1
    detect_s: float = 60.0
    restart_s: float = 420.0
    """Of other systems: until a failure is noticed, and until all processes are back and have loaded a checkpoint."""
    requorum_s: float = 15.0

    @property
    def paced_s(self) -> float:
        """A step with its share of the wait for checkpoints."""
        every = self.checkpoint_every
        return self.step_s + (self.checkpoint_stall_s / every if every else 0.0)

    @property
    def blocks(self) -> int:
        return self.gpus // self.block // self.pp * self.pp

    def problem(self) -> str | None:
        if self.blocks < self.pp:
            return (
                f"{self.gpus} accelerators are {self.gpus // self.block} blocks of {self.block}; pp {self.pp} needs as many"
            )
        if unknown := set(self.policies) - set(POLICIES):
            return f"no policy is called {', '.join(sorted(unknown))}; there are {', '.join(POLICIES)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """lost: seconds of the job's time by cause. goodput: what was committed for good, of what undisturbed training is."""

    policy: str
    seconds: float
    """Of the time that was looked at."""
    goodput: float
    steps: int
    faults: int
    lost: dict[str, float]
    rerun_s: float
    rolled_back: int
    pause_p50_s: float
    pause_p99_s: float
    moved_gb: float
    rungs: dict[str, int]
    energy_mwh: float
    energy_lost_mwh: float


def trace_of(scene: WhatIf) -> list[Arrival]:
    waves = SpotWaves(per_day=scene.spot_waves_a_day, blocks=scene.spot_blocks)
    rng = Random(f"arrivals {scene.name} {scene.seed}")
    return arrivals(rng, days=scene.days, gpus=scene.gpus, blocks=scene.blocks, rate=scene.rate, waves=waves)


def report(scene: WhatIf, policy: str, trace: Sequence[Arrival], tell: Callable[[float], None] = lambda _: None) -> Report:
    """The policy on this trace; tell: how much of it is over."""
    match policy:
        case "restart":
            return _restart(scene, trace)
        case "shrink":
            return _shrink(scene, trace)
    fleet = fleet_of(scene)
    play(scene, fleet, trace, tell)
    tally = fleet.tally
    pauses = [pause for _, pause in tally.pauses]
    return _report(
        scene,
        policy,
        steps=tally.committed,
        faults=tally.faults,
        lost=tally.lost_s,
        rerun_s=tally.rerun_s,
        rolled_back=tally.rolled_back,
        pauses=pauses,
        moved_gb=tally.moved_bytes / 1e9,
        rungs=tally.rungs,
    )


def fleet_of(scene: WhatIf, *, dense: bool = False) -> Fleet:
    blocks, pp = scene.blocks, scene.pp
    numel = int(scene.params / pp / BLOCK / blocks + 1) * BLOCK * blocks
    lines = tuple(Line(name=f"stage{i}", shape=(numel,), split=False, layers=(i,), decay=True) for i in range(pp))
    # Memory was thought of by whoever chose the block: what is simulated is who has what, not whether it fits.
    small = tuple(replace(line, shape=(BLOCK * blocks * 4,)) for line in lines)
    scale = numel / (BLOCK * blocks * 4)
    dp = None if scene.shrinks and blocks <= MOST_PLANNED else blocks // pp
    spec = JobSpec(
        name=scene.name,
        program="causal_lm",
        data=DataSpec(files=("*.txt",)),
        train=TrainSpec(steps=10**9, micro_batches=blocks, micro_batch_size=1, sequence=8, seed=scene.seed),
        parallel=ParallelSpec(tp=1, pp=pp, dp=dp, max_devices=blocks),
        checkpoint=CheckpointSpec(every=scene.checkpoint_every),
        recovery=RecoverySpec(spares=scene.spares, mirrors=scene.mirrors, max_attempts=10**6, max_external_attempts=10**6),
    )
    nodes = [Node(id=NodeId(f"n{i:05}"), kind="cpu", num_devices=1) for i in range(blocks + scene.spares)]
    profile = Profile(num_layers=pp, lines=small, divisors=(), activation_bytes=64)
    pace = Pace(step_s=scene.paced_s, bytes_s=50e9 * scene.block, element_bytes=12 * scale)
    return Fleet(spec, profile, nodes, pace, dense=dense)


def play(scene: WhatIf, fleet: Fleet, trace: Sequence[Arrival], tell: Callable[[float], None] = lambda _: None) -> None:
    fleet.run_until(WARM_UP_S)
    fleet.begin()
    for number, one in enumerate(trace):
        fleet.run_until(WARM_UP_S + one.at)
        device = Device(NodeId(f"n{one.victim:05}"), 0)
        seen_s = fleet.pace.hang_s if one.mode.cause == "hang" else fleet.pace.detect_s
        if one.mode.takes_machine:
            fleet.lose_node(device.node, one.mode.cause, one.mode.repaired_s)
        else:
            fleet.lose_rank(device, one.mode.cause, seen_s)
        tell(number / len(trace))
    fleet.run_until(WARM_UP_S + scene.days * DAY_S)
    fleet.close()


def _restart(scene: WhatIf, trace: Sequence[Arrival]) -> Report:
    """Goes on with the groups that are whole, and is started once more when a machine has come back."""
    total, interval, groups = scene.days * DAY_S, scene.checkpoint_every * scene.paced_s, _groups(scene)
    lost: dict[str, float] = {}
    starts = []
    for one, absent_s in away(scene, trace):
        starts.append((one.at, scene.detect_s + scene.restart_s, one.mode.cause))
        if absent_s:
            starts.append((one.at + absent_s, scene.restart_s, one.mode.cause))
            _add(lost, one.mode.cause, min(absent_s, max(0.0, total - one.at)) / groups)
    pauses, rolled, free_at, saved_at = [], 0.0, 0.0, 0.0
    for at, pause, cause in sorted(starts):
        if at < free_at or at >= total:
            continue  # while everything starts anyway
        trained = at - saved_at
        rolled += trained % interval if interval else trained
        _add(lost, cause, pause)
        pauses.append(pause)
        free_at = saved_at = at + pause
    steps = int(max(0.0, total - sum(lost.values()) - rolled) / scene.paced_s)
    return _report(
        scene, "restart", steps=steps, faults=len(trace), lost=lost, rerun_s=rolled,
        rolled_back=int(rolled / scene.paced_s), pauses=pauses, moved_gb=12 * scene.params * len(pauses) / 1e9, rungs={},
    )  # fmt: skip


def _shrink(scene: WhatIf, trace: Sequence[Arrival]) -> Report:
    """A group is away until its machine has been replaced and has started; the others agree on who is left, and go on."""
    total, groups = scene.days * DAY_S, _groups(scene)
    lost: dict[str, float] = {}
    away_until: dict[int, float] = {}
    """By group."""
    for one, absent_s in away(scene, trace):
        group = one.victim // scene.pp
        until = min(total, one.at + scene.detect_s + scene.restart_s + absent_s)
        more_s = max(0.0, until - max(one.at, away_until.get(group, 0.0)))
        away_until[group] = max(until, away_until.get(group, 0.0))
        _add(lost, one.mode.cause, scene.requorum_s + more_s / groups)
    rerun = scene.paced_s / 2 * len(trace)
    steps = int(max(0.0, total - sum(lost.values()) - rerun) / scene.paced_s)
    return _report(
        scene, "shrink", steps=steps, faults=len(trace), lost=lost, rerun_s=rerun, rolled_back=0,
        pauses=[scene.requorum_s] * len(trace), moved_gb=12 * scene.params / groups * len(trace) / 1e9, rungs={},
    )  # fmt: skip


def away(scene: WhatIf, trace: Sequence[Arrival]) -> list[tuple[Arrival, float]]:
    """Each fault, and for how many seconds nobody is there in the place of a machine that it took: 0 where a spare is."""
    idle_at = [0.0] * scene.spares
    found = []
    for one in trace:
        absent_s = 0.0
        if one.mode.takes_machine:
            back_at = one.at + one.mode.repaired_s
            first = min(range(len(idle_at)), key=idle_at.__getitem__, default=None)
            if first is not None and idle_at[first] <= back_at:
                absent_s = max(0.0, idle_at[first] - one.at)
                idle_at[first] = back_at
            else:
                absent_s = one.mode.repaired_s
        found.append((one, absent_s))
    return found


def _groups(scene: WhatIf) -> int:
    return max(1, scene.blocks // scene.pp)


def _add(lost: dict[str, float], cause: str, seconds: float) -> None:
    lost[cause] = lost.get(cause, 0.0) + seconds


def _report(
    scene: WhatIf, policy: str, *, steps: int, faults: int, lost: Mapping[str, float], rerun_s: float, rolled_back: int,
    pauses: Sequence[float], moved_gb: float, rungs: Mapping[str, int],
) -> Report:  # fmt: skip
    total = scene.days * DAY_S
    goodput = steps * scene.step_s / total
    mwh = scene.gpus * scene.device_w * scene.pue * total / 3600 / 1e6
    ordered = sorted(pauses) or [0.0]
    stalled = {"checkpoints": steps * (scene.paced_s - scene.step_s)} if scene.checkpoint_stall_s else {}
    return Report(
        policy=policy,
        seconds=round(total, 3),
        goodput=round(goodput, 6),
        steps=steps,
        faults=faults,
        lost={cause: round(seconds, 3) for cause, seconds in sorted({**lost, **stalled}.items())},
        rerun_s=round(rerun_s, 3),
        rolled_back=rolled_back,
        pause_p50_s=round(ordered[len(ordered) // 2], 3),
        pause_p99_s=round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        moved_gb=round(moved_gb, 1),
        rungs=dict(sorted(rungs.items())),
        energy_mwh=round(mwh, 1),
        energy_lost_mwh=round(mwh * max(0.0, 1 - goodput), 2),
    )


def scene_of(data: Mapping[str, Any]) -> WhatIf:
    """Raises ValueError, in words for whoever wrote the file."""
    known = {field.name for field in fields(WhatIf)}
    if unknown := set(data) - known:
        raise ValueError(f"{', '.join(sorted(unknown))} means nothing here; a scenario has {', '.join(sorted(known))}")
    if not {"name", "gpus"} <= set(data):
        raise ValueError("a scenario needs a name and gpus, how many accelerators the job has")
    scene = WhatIf(**{**data, "policies": tuple(data.get("policies", POLICIES))})
    if problem := scene.problem():
        raise ValueError(problem)
    return scene


def main() -> int:
    """stdin: one scenario, with `sweep: {field: [values]}` beside its fields where it is to be varied."""
    data = dict(json.load(sys.stdin))
    sweep: Mapping[str, Sequence[Any]] = data.pop("sweep", None) or {}
    try:
        scenes = [scene_of(data)]
        for name, values in sweep.items():
            scenes = [scene_of({**asdict(scene), name: value}) for scene in scenes for value in values]
    except (TypeError, ValueError) as error:
        print(json.dumps({"refused": str(error)}))
        return 0
    runs = [(scene, policy) for scene in scenes for policy in scene.policies]
    told = []
    for number, (scene, policy) in enumerate(runs):

        def tell(done: float, number: int = number) -> None:
            print(f"{(number + done) / len(runs):.3f}", file=sys.stderr, flush=True)

        found = report(scene, policy, trace_of(scene), tell)
        told.append({"scenario": {name: getattr(scene, name) for name in ("name", "seed", *sweep)}, **asdict(found)})
    print(json.dumps({"reports": told}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
