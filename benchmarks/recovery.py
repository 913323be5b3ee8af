"""How long a failure stops training: one at a random instant, again and again, in a job of eight ranks; peers beside it.

    python -m benchmarks.recovery --json [--kinds rank_kill,power_loss] [--trials 10] [--full] [--skip-peers]

A pause is the wall time from the failure to the next committed step at full strength, less one undisturbed median step.
Kinds: a rank killed or stopped, a node killed or silenced without a reset while a warm spare stands by; a cluster and a job
for each. --full adds what orchestration costs (benchmarks.train). The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from api.client import Client
from api.client.errors import ClientError
from api.views import IncidentView
from orchestrator.domain.errors import EverstepError

from . import train
from .alarms import false_alarms
from .cluster import Job, NotMeasured, end_in_good_order, local_cluster, say
from .peer import PeerFailed
from .peer_recovery import CONTESTANTS, peer_figures
from .trial import QUIET_STEPS, Recovery, figures, in_words, steps_lost, trial
from .victims import KINDS, Kind, Victims
from .workload import recovery_workload, train_workload

TAX = ("tax_ratio", "tax_ratio_mirrors", "tax_ratio_exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one kind. missed: why there are fewer trials than asked for; empty where there are all."""

    recoveries: tuple[Recovery, ...]
    uncaused: tuple[IncidentView, ...]
    """Recoveries from nothing."""
    suspected: int
    """Suspected hangs that were none."""
    steps_lost: int
    missed: str = ""


def main() -> int:
    asked = _arguments()
    end_in_good_order()
    seed = asked.seed if asked.seed is not None else Random().randrange(1 << 31)
    say(f"--seed {seed}")
    found = {kind.name: measured(kind, asked.trials, Random(f"{seed} {kind.name}")) for kind in asked.kinds}
    # After the clusters have gone: a peer's pause is not to be lengthened by what is not its own.
    tax = _tax() if asked.full else dict.fromkeys(TAX)
    peers: dict[str, float | None] = {key: None for one in CONTESTANTS for key in one.figures}
    if not asked.skip_peers:
        peers = peer_figures(recovery_workload(), QUIET_STEPS, Random(f"{seed} peers"))
    if not asked.json:
        _show(found)
    print(json.dumps(summary(found) | tax | {"peers": peers, "seed": seed}), flush=True)
    return 1 if any(one.missed for one in found.values()) else 0


def measured(kind: Kind, trials: int, random: Random) -> Measured:
    """On a cluster of its own; what was measured until something else happened, and what that was."""
    recoveries: list[Recovery] = []
    uncaused: list[IncidentView] = []
    suspected, lost, missed = 0, 0, ""
    try:
        with local_cluster(kind.nodes) as cluster, Client(cluster.url, retry_s=60) as client:
            job, victims = Job(client, recovery_workload(kind.spares)), Victims(kind, cluster, client, random)
            try:
                job.wait_for_step(QUIET_STEPS)
                for number in range(trials):
                    seen = recoveries[-1].incident if recoveries else 0
                    one, others = trial(job, victims, random, f"{kind.name}, {number + 1} of {trials}", seen)
                    recoveries.append(one)
                    uncaused += others
                    suspected = false_alarms(cluster.url, job.id)  # each time: the gauge is of running jobs only
            finally:
                lost = steps_lost(job.fetch())
    except (NotMeasured, ClientError, EverstepError) as error:
        missed = str(error)
        say(f"{kind.name}: {len(recoveries)} of {trials} trials, then: {missed}")
    return Measured(
        recoveries=tuple(recoveries), uncaused=tuple(uncaused), suspected=suspected, steps_lost=lost, missed=missed
    )


def summary(found: dict[str, Measured]) -> dict[str, object]:
    """Every kind has its key, null where it was not measured; counts are None where nothing was."""
    kinds: dict[str, object] = {}
    for name in KINDS:
        one = found.get(name)
        kinds[name] = figures(one.recoveries) if one and one.recoveries else None
        if one and one.missed:
            kinds[f"{name}_missed"] = one.missed
    recoveries = [recovery for one in found.values() for recovery in one.recoveries]
    if not recoveries:
        return kinds | dict.fromkeys(("steps_lost", "steps_rolled_back", "false_alarms", "step_s"))
    return kinds | {
        "steps_lost": sum(one.steps_lost for one in found.values()),
        "steps_rolled_back": sum(recovery.rolled_back for recovery in recoveries),
        "false_alarms": sum(one.suspected + len(one.uncaused) for one in found.values()),
        "step_s": round(median(recovery.step_s for recovery in recoveries), 4),
    }


def _tax() -> dict[str, object]:
    """Without mirrors and with, each against the same code in the same minutes; exactness is priced without."""
    found: dict[str, object] = dict.fromkeys(TAX)
    try:
        without, _ = train.measured(train_workload((2, 2, 2), mirrors=0))
        found |= {"tax_ratio": without["tax_ratio"], "tax_ratio_exact": without["tax_ratio_exact"]}
        mirrored, _ = train.measured(train_workload((2, 2, 2), mirrors=1))
        found |= {"tax_ratio_mirrors": mirrored["tax_ratio"]}
    except (NotMeasured, PeerFailed, ClientError, EverstepError) as error:
        say(f"what orchestration costs is not measured: {error}")
    return found


def _show(found: dict[str, Measured]) -> None:
    print("kind              pause    +rerun   commit-commit  phases")
    for name, one in found.items():
        for each in one.recoveries:
            lost = each.commit_to_commit_s - each.step_s
            print(f"{name:16}  {each.pause_s:6.3f}   {each.fault_to_commit_s:6.3f}   {lost:13.3f}  {in_words(each.phases)}")


def kinds_named(text: str) -> Sequence[Kind]:
    """Of `a,b`. Raises ArgumentTypeError."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no kind {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    return [KINDS[name] for name in dict.fromkeys(names)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON line and nothing before it")
    parser.add_argument("--trials", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", type=kinds_named, default=list(KINDS.values()), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--full", action="store_true", help="measure the tax ratios as well; about half an hour more")
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--seed", type=int, help="of whom and when; another one every time by default")
    asked = parser.parse_args()
    if asked.trials < 1:
        parser.error(f"--trials is {asked.trials}, at least 1 is needed; raise it")
    return asked


if __name__ == "__main__":
    sys.exit(main())
