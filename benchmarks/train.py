"""What orchestration costs: a step under Everstep, the same parallel code under torchrun, plain and exact, and plain torch.

    python -m benchmarks.train --json [--blocks 20] [--seconds 3] [--mirrors 1] [--degrees 2,2,2]

All contenders live side by side, with the whole cluster up, and all but the one that is measured are stopped by
signals. A block is a few seconds of one of them after a warm-up that does not count; blocks alternate, so what changes
slowly on the machine changes for all. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Protocol

from api.client import Client
from deploy.local import LocalCluster, status
from orchestrator.adapters.processes import ProcessId, identify
from orchestrator.domain import codec

from .cluster import NODES, Job, NotMeasured, end_in_good_order, local_cluster, plan_of, processes_of, ranks_of, say
from .cpu import cpu_seconds
from .stats import StepTime, paired_ratio, step_times, within
from .torchrun import Torchrun
from .workload import WORLD_SIZE, Workload, train_workload

WARM_UP_S = 1.0
"""After a contender was continued: caches fill, the step that was interrupted ends."""
REPORT_S = 0.5
"""For the last committed steps to arrive where they are read."""
LEAST_STEPS = 4
"""In a block; one with fewer goes on."""
LONGEST_BLOCK_S = 60.0
STRIDE = 7
"""Through the orders of contenders, so that few blocks already have each of them in each place."""
FIRST_STEPS = 10
"""Of each contender before the first block."""
NUM_BLOCKS = 20
BLOCK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """step_s: median step; step_cpu_s: CPU time of a mean step, all training processes; other_cores: in use beside them."""

    step_s: float
    step_cpu_s: float
    other_cores: float


class Contender(Protocol):
    name: str

    def processes(self) -> Sequence[ProcessId]:
        """Those that train, and whatever starts them where they are a peer's."""
        ...

    def go(self) -> None: ...

    def stop(self) -> None: ...

    def steps(self) -> list[StepTime]:
        """Every step so far. Raises NotMeasured, PeerFailed where it does not simply train."""
        ...


class Everstep:
    """The job's training processes are stopped, and before them whoever would take that for a failure: its hosts and the
    supervisor, who judge nobody by a time in which they did not run themselves. API, Redis and Ray go on."""

    name = "everstep"

    def __init__(self, job: Job, cluster: LocalCluster) -> None:
        self._job = job
        view = job.wait_for_step(FIRST_STEPS)
        assert view.plan is not None
        self.plan = plan_of(view.plan)
        self.summary = view.plan.summary
        self._generation = view.generation
        self._ranks = tuple(ranks_of(view).values())
        supervisor = status(cluster.state_dir)["processes"]
        assert isinstance(supervisor, dict)
        watching = [supervisor["supervisor"], *sorted({_parent(_parent(rank.pid)) for rank in self._ranks})]
        self._watching = tuple(process for pid in watching if (process := identify(pid)) is not None)
        self.niceness = max(os.getpriority(os.PRIO_PROCESS, rank.pid) for rank in self._ranks)

    def processes(self) -> Sequence[ProcessId]:
        return self._ranks

    def go(self) -> None:
        for process in (*self._ranks, *reversed(self._watching)):
            process.send(signal.SIGCONT)

    def stop(self) -> None:
        for process in (*self._watching, *self._ranks):
            process.send(signal.SIGSTOP)

    def steps(self) -> list[StepTime]:
        found = self._job.fetch()
        if found[-1].generation != self._generation:
            why = "; ".join(incident.message for incident in self._job.view().incidents)
            raise NotMeasured(f"generation {self._generation} ended: {why}")
        return [StepTime(at=step.at.timestamp(), seconds=step.seconds) for step in found if step.seconds is not None]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Alongside:
    def __init__(self, torchrun: Torchrun) -> None:
        self.name = torchrun.name
        self._torchrun = torchrun
        self.processes, self.go, self.stop = torchrun.processes, torchrun.go, torchrun.stop

    def steps(self) -> list[StepTime]:
        self._torchrun.check()
        return step_times([done.at for done in self._torchrun.steps()])


def main() -> int:
    asked = _arguments()
    end_in_good_order()
    result, blocks = measured(train_workload(asked.degrees, asked.mirrors), asked.blocks, asked.seconds)
    if not asked.json:
        for name, found in blocks.items():
            steps = [block.step_s for block in found]
            print(f"{name:12} {median(steps):.4f} s a step, blocks from {min(steps):.4f} to {max(steps):.4f} s")
    print(json.dumps(result), flush=True)
    return 0


def measured(
    workload: Workload, num_blocks: int = NUM_BLOCKS, seconds: float = BLOCK_S
) -> tuple[dict[str, object], dict[str, list[Block]]]:
    """The figures of one run and the blocks behind them, by contender. Raises NotMeasured, PeerFailed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="everstep-bench-peers-")))
        cluster = stack.enter_context(local_cluster(NODES))
        client = stack.enter_context(Client(cluster.url))
        ours = Everstep(Job(client, workload), cluster)
        stack.callback(ours.go)  # whoever ends the ranks in good order finds them able to end
        ours.stop()
        say(f"everstep: {ours.summary}, mirrors {workload.mirrors}")
        if ours.niceness != os.getpriority(os.PRIO_PROCESS, 0):  # of this process, and so of the peers
            say(f"its ranks run at niceness {ours.niceness}, the peers' do not: on a busy machine this is no comparison")
        spec, plan = folder / "spec.json", folder / "plan.json"
        spec.write_bytes(codec.dumps(workload.spec()))
        plan.write_bytes(codec.dumps(ours.plan))
        contenders: list[Contender] = [ours]
        for module, argument in (("same_code", str(plan)), ("exact_code", str(plan)), ("plain_torch", str(ours.plan.pp))):
            peer = stack.enter_context(Torchrun(module, WORLD_SIZE, [str(spec), argument], folder))
            peer.wait_for_step(FIRST_STEPS)
            peer.stop()
            say(f"{module}: {WORLD_SIZE} ranks under torchrun")
            contenders.append(Alongside(peer))
        ranks = set(ours.processes())
        others = [process for process in processes_of(cluster) if process not in ranks]
        blocks = _measure(contenders, others, num_blocks, seconds)
    return _result(blocks) | {"mirrors": workload.mirrors, "plan": ours.summary, "blocks": num_blocks}, blocks


def _measure(
    contenders: Sequence[Contender], others: Sequence[ProcessId], count: int, seconds: float
) -> dict[str, list[Block]]:
    """By contender; blocks of one index belong together. others: what is up in all blocks and trains in none."""
    found: dict[str, list[Block]] = {contender.name: [] for contender in contenders}
    orders = list(permutations(contenders))
    for number in range(count):
        for contender in orders[number * STRIDE % len(orders)]:
            found[contender.name].append(_block(contender, others, seconds))
        said = ", ".join(f"{name} {blocks[-1].step_s:.4f}" for name, blocks in found.items())
        say(f"block {number + 1:2} of {count}: {said}")
    return found


def _block(contender: Contender, others: Sequence[ProcessId], seconds: float) -> Block:
    contender.go()
    try:
        time.sleep(WARM_UP_S)
        trained, rest = cpu_seconds(contender.processes()), cpu_seconds(others)
        begin = time.time()
        while True:
            time.sleep(seconds)
            end = time.time()
            trained_by, rest_by = cpu_seconds(contender.processes()), cpu_seconds(others)  # before asking takes its time
            if len(within(contender.steps(), begin, end)) >= LEAST_STEPS:
                break
            if end - begin > LONGEST_BLOCK_S:
                raise NotMeasured(f"{contender.name} made fewer than {LEAST_STEPS} steps in {end - begin:.0f} s")
    finally:
        contender.stop()
    time.sleep(REPORT_S)
    steps = within(contender.steps(), begin, end)
    span = end - begin
    return Block(
        step_s=median(steps),
        step_cpu_s=(trained_by - trained) / span * fmean(steps),
        other_cores=(rest_by - rest) / span,
    )


def _result(blocks: dict[str, list[Block]]) -> dict[str, object]:
    ours, same, plain = (blocks[name] for name in ("everstep", "same_code", "plain_torch"))
    exact = paired_ratio([block.step_s for block in blocks["exact_code"]], [block.step_s for block in same])
    tax = paired_ratio([block.step_s for block in ours], [block.step_s for block in same])
    torch = paired_ratio([block.step_s for block in ours], [block.step_s for block in plain])
    work = paired_ratio([block.step_cpu_s for block in ours], [block.step_cpu_s for block in same])
    return {
        "tax_ratio": round(tax.value, 4),
        "tax_ratio_high": round(tax.high, 4),
        "tax_ratio_exact": round(exact.value, 4),
        "tax_ratio_exact_low": round(exact.low, 4),
        "tax_ratio_exact_high": round(exact.high, 4),
        "ratio_to_torch": round(torch.value, 4),
        "step_s": round(median(block.step_s for block in ours), 4),
        "tax_ratio_low": round(tax.low, 4),
        "ratio_to_torch_low": round(torch.low, 4),
        "ratio_to_torch_high": round(torch.high, 4),
        "same_code_step_s": round(median(block.step_s for block in same), 4),
        "plain_torch_step_s": round(median(block.step_s for block in plain), 4),
        # CPU time of the training processes, which other load on the machine disturbs less; and cores that the rest of the
        # cluster uses while the job trains and while it stands still.
        "cpu_ratio": round(work.value, 4),
        "cpu_ratio_high": round(work.high, 4),
        "step_cpu_s": round(median(block.step_cpu_s for block in ours), 4),
        "cluster_cores_training": round(median(block.other_cores for block in ours), 4),
        "cluster_cores_idle": round(median(block.other_cores for block in same), 4),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON line and nothing before it")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="of each contender, at least 2")
    parser.add_argument("--seconds", type=float, default=BLOCK_S, help="of one block")
    parser.add_argument("--mirrors", type=int, choices=(0, 1), default=1, help="of Everstep; its peers have none")
    parser.add_argument(
        "--degrees", type=_degrees, default=(2, 2, 2), help="tp,pp,dp of Everstep and the same code; torch has tp 1"
    )
    asked = parser.parse_args()
    if asked.blocks < 2:
        parser.error(f"--blocks is {asked.blocks}, at least 2 make an interval; raise it")
    return asked


def _degrees(text: str) -> tuple[int, int, int]:
    tp, pp, dp = (int(part) for part in text.split(","))
    if tp * pp * dp != WORLD_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is {tp * pp * dp} ranks, {WORLD_SIZE} are measured; use 2,2,2 or 1,2,4")
    return tp, pp, dp


if __name__ == "__main__":
    sys.exit(main())
