"""What goodput a job will have on a cluster: a scenario, the faults it meets, and what each policy makes of those faults.

`everstep` is this code base's own kernel (fleet.py), the others are models of other systems (others.py).
`python -m orchestrator.sim.whatif` reads scenarios as JSON from stdin, tells its progress on stderr and prints the reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.profile import BLOCK, Line, Profile
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec

from .arrivals import DAY_S, Arrival
from .fleet import Fleet
from .others import restart, shrink
from .pace import Pace
from .report import Report, report_of
from .scene import WhatIf, scene_of, trace_of

WARM_UP_S, WARM_UP_STEPS = 120.0, 20
"""Before the first fault: hosts open, the first plan is made and steps pass; not part of what is measured."""
MOST_PLANNED = 2048
"""Blocks up to which a job is planned smaller while some are away; a larger one waits for them."""
IDS, MIXED_IDS = 4, 16
"""Micro-batches of a step for each block: what is left of a cluster shares them out in whole ones. Where kinds are mixed
there are more, so that the slowest can be given fewer than others and still fill its pipeline."""


def report(scene: WhatIf, policy: str, trace: Sequence[Arrival], tell: Callable[[float], None] = lambda _: None) -> Report:
    """The policy on this trace; tell: how much of it is over."""
    match policy:
        case "restart":
            return restart(scene, trace)
        case "shrink":
            return shrink(scene, trace)
    fleet = fleet_of(scene)
    play(scene, fleet, trace, tell)
    tally = fleet.tally
    pauses = [pause for _, pause in tally.pauses]
    return report_of(
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
    ids = MIXED_IDS if scene.kinds else IDS
    spec = JobSpec(
        name=scene.name,
        program="causal_lm",
        data=DataSpec(files=("*.txt",)),
        train=TrainSpec(
            steps=10**9,
            micro_batches=ids * blocks,
            micro_batch_size=1,
            sequence=8,
            seed=scene.seed,
            emulated_layer_s=scene.step_s / ids / pp if scene.kinds else 0.0,
        ),
        parallel=ParallelSpec(tp=1, pp=pp, dp=dp, max_devices=blocks),
        checkpoint=CheckpointSpec(every=scene.checkpoint_every),
        recovery=RecoverySpec(spares=scene.spares, mirrors=scene.mirrors, max_attempts=10**6, max_external_attempts=10**6),
    )
    nodes = [Node(id=NodeId(f"n{i:05}"), kind=_kind(scene, i), num_devices=1) for i in range(blocks + scene.spares)]
    profile = Profile(num_layers=pp, lines=small, divisors=(), activation_bytes=64)
    pace = Pace(step_s=scene.paced_s, bytes_s=50e9 * scene.block, element_bytes=12 * scale)
    return Fleet(spec, profile, nodes, pace, dense=dense)


def play(scene: WhatIf, fleet: Fleet, trace: Sequence[Arrival], tell: Callable[[float], None] = lambda _: None) -> None:
    begins_at = WARM_UP_S + WARM_UP_STEPS * scene.paced_s
    fleet.run_until(begins_at)
    fleet.begin()
    for one in (one for one in trace if one.mode.slows):
        fleet.expect_change(begins_at + one.at)
    for number, one in enumerate(trace):
        fleet.run_until(begins_at + one.at)
        device, mode = Device(NodeId(f"n{one.victim:05}"), 0), one.mode
        if mode.slows:
            fleet.slow_down(device, mode.slows, mode.repaired_s)
        elif mode.takes_machine and mode.notice_s:
            fleet.take_away(device.node, mode.cause, mode.notice_s, mode.repaired_s)
        elif mode.takes_machine:
            fleet.lose_node(device.node, mode.cause, mode.repaired_s)
        else:
            fleet.lose_rank(device, mode.cause, fleet.pace.hang_s if mode.cause == "hang" else fleet.pace.detect_s)
        tell(number / len(trace))
    fleet.run_until(begins_at + scene.days * DAY_S)
    fleet.close()


def _kind(scene: WhatIf, block: int) -> str:
    """The first of each pipeline's worth of blocks are of the first kind, and so on; spares of each in turn."""
    if not scene.kinds:
        return "cpu"
    number = block * len(scene.kinds) // scene.blocks if block < scene.blocks else block
    return scene.kinds[number % len(scene.kinds)]


def main() -> int:
    """stdin: one scenario, with `sweep: {field: [values]}` beside its fields where it is to be varied."""
    data = dict(json.load(sys.stdin))
    sweep: Mapping[str, Sequence[Any]] = data.pop("sweep", None) or {}
    try:
        scenes = [scene_of(data)]
        for name, values in sweep.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"sweep: {name} is {values!r}, and has to be a list of values to try, such as [0, 2]")
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
