"""How long a peer's own recovery takes: one worker of a data-parallel job of the same model killed, again and again.

It measures from outside, by the lines the workers write, and in the same way whether a peer ends and starts all workers or
has survivors go on without the dead one. A peer that is not installed, or fails, has no figures, and it is said why.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from orchestrator.adapters.processes import identify
from orchestrator.domain import codec

from .cluster import say
from .peer import START_S, Peer, PeerFailed, PeerStep
from .raytrain import RayTrain
from .stats import step_times
from .torchft import Torchft
from .torchrun import Torchrun
from .workload import Workload

TRIALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPause:
    """Seconds from a kill to the first new step, and to the first one with everybody, each less one undisturbed step."""

    resume_s: float
    full_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """make: of a spec file, the number of workers and the most restarts. figures: its keys, by attribute of a pause."""

    name: str
    needs: tuple[str, ...]
    make: Callable[[Path, int, int], Peer]
    figures: dict[str, str]


CONTESTANTS = (
    Contestant(
        name="torchrun",
        needs=("torch",),
        make=lambda spec, workers, restarts: Torchrun(
            "torchrun_job",
            workers,
            [str(spec), str(spec.with_suffix(".checkpoint"))],
            spec.parent,
            ["--standalone", f"--max-restarts={restarts}", "--monitor-interval=0.1"],
        ),
        figures={"torchrun_s": "full_s"},
    ),
    Contestant(
        name="torchft",
        needs=("torchft",),
        make=Torchft,
        figures={"torchft_resume_s": "resume_s", "torchft_full_s": "full_s"},
    ),
    Contestant(
        name="Ray Train",
        needs=("ray", "pyarrow", "pandas"),
        make=RayTrain,
        figures={"raytrain_s": "full_s"},
    ),
)


def peer_figures(workload: Workload, quiet_steps: int, random: Random) -> dict[str, float | None]:
    """Medians by key; None where a peer could not be measured. One peer at a time, as many workers as micro-batches."""
    found: dict[str, float | None] = {}
    for one in CONTESTANTS:
        pauses: list[PeerPause] = []
        if missing := [module for module in one.needs if find_spec(module) is None]:
            say(f"{one.name} is not measured: {', '.join(missing)} is not installed; pip install -e '.[bench]'")
        else:
            try:
                pauses = _pauses(one, workload, quiet_steps, random)
            except PeerFailed as error:
                say(f"{one.name} is not measured: {error}")
        for key, attribute in one.figures.items():
            found[key] = round(median(getattr(pause, attribute) for pause in pauses), 4) if pauses else None
    return found


def _pauses(one: Contestant, workload: Workload, quiet_steps: int, random: Random) -> list[PeerPause]:
    found = []
    with TemporaryDirectory(prefix="everstep-bench-peers-", ignore_cleanup_errors=True) as folder:
        spec = Path(folder) / "spec.json"
        spec.write_bytes(codec.dumps(workload.spec()))
        with one.make(spec, workload.micro_batches, TRIALS + 1) as peer:
            peer.wait_for_step(1)
            for number in range(TRIALS):
                peer.wait_for_step(newest(peer.steps()) + quiet_steps)
                found.append(_pause(peer, workload.micro_batches, quiet_steps, random))
                say(
                    f"{one.name}, kill {number + 1} of {TRIALS}: goes on after {found[-1].resume_s:.3f} s, "
                    f"with everybody after {found[-1].full_s:.3f} s"
                )
    return found


def _pause(peer: Peer, num_workers: int, quiet_steps: int, random: Random) -> PeerPause:
    steps = peer.steps()
    now = {step.rank: step.pid for step in steps}  # the last line of a rank is its living worker's
    times = step_times([step.at for step in steps if step.pid == now[0]])
    undisturbed = median(step.seconds for step in times[-quiet_steps:])
    victim = identify(random.choice([now[rank] for rank in sorted(now)]))
    time.sleep(random.uniform(0.0, undisturbed))
    if victim is None:
        raise PeerFailed(f"a worker of {peer.name} ended by itself: {peer.last_words()}")
    killed_at = time.time()
    victim.send(signal.SIGKILL)
    deadline = time.monotonic() + START_S
    while True:
        time.sleep(0.05)
        peer.check()
        back = came_back(peer.steps(), frozenset(now.values()), num_workers, killed_at)
        if back is not None:
            return PeerPause(resume_s=back[0] - killed_at - undisturbed, full_s=back[1] - killed_at - undisturbed)
        if time.monotonic() > deadline:
            raise PeerFailed(f"{peer.name} was not back within {START_S:g} s of a kill: {peer.last_words()}")


def came_back(
    steps: Sequence[PeerStep], old: frozenset[int], num_workers: int, killed_at: float
) -> tuple[float, float] | None:
    """Instants of the first step nobody had done before, and of the first of those by a new process with everybody.

    old: pids before the kill. A step that was under way may still be done by all of them: it is none of these. None until
    there are both.
    """
    # Who tells its members commits a step once; who starts everybody again repeats what the checkpoint does not hold.
    done = newest([step for step in steps if step.pid in old and step.members == 0])
    new = [step for step in steps if step.at > killed_at and step.step > done]
    first = [step.at for step in new if step.pid not in old or 0 < step.members < num_workers]
    whole = [step.at for step in new if step.pid not in old and step.members in (0, num_workers)]
    return (min(first), min(whole)) if whole else None


def newest(steps: Sequence[PeerStep]) -> int:
    return max((step.step for step in steps), default=0)
