"""How long torchrun's own recovery takes: one worker killed in a job that checkpoints at every step.

It measures from outside, by the lines the workers write; torchrun ends and starts all of them, whoever was killed.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random
from statistics import median

from orchestrator.adapters.processes import identify

from .cluster import say
from .stats import step_times
from .torchrun import START_S, PeerFailed, PeerStep, Torchrun


def torchrun_pauses(spec: Path, num_workers: int, trials: int, quiet_steps: int, random: Random) -> list[float]:
    """Seconds from each kill to the first step nobody had done before, less one undisturbed median step."""
    options = ["--standalone", f"--max-restarts={trials + 1}", "--monitor-interval=0.1"]
    arguments = [str(spec), str(spec.with_suffix(".checkpoint"))]
    found = []
    with Torchrun("torchrun_job", num_workers, arguments, spec.parent, options) as peer:
        peer.wait_for_step(1)
        for number in range(trials):
            peer.wait_for_step(_newest(peer.steps()) + quiet_steps)
            found.append(_pause(peer, quiet_steps, random))
            say(f"torchrun, kill {number + 1} of {trials}: pause {found[-1]:.3f} s")
    return found


def _pause(peer: Torchrun, quiet_steps: int, random: Random) -> float:
    steps = peer.steps()
    now = {step.rank: step.pid for step in steps}  # the last line of a rank is its living worker's
    times = step_times([step.at for step in steps if step.pid == now[0]])
    undisturbed = median(step.seconds for step in times[-quiet_steps:])
    victim = identify(random.choice(list(now.values())))
    time.sleep(random.uniform(0.0, undisturbed))
    if victim is None:
        raise PeerFailed(f"a worker of {peer.name} ended by itself: {peer.last_words()}")
    killed_at = time.time()
    victim.send(signal.SIGKILL)
    old, deadline = set(now.values()), time.monotonic() + START_S
    while True:
        time.sleep(0.05)
        peer.check()
        steps = peer.steps()
        done = _newest([step for step in steps if step.pid in old])
        new = [step.at for step in steps if step.pid not in old and step.step > done]
        if new:
            return min(new) - killed_at - undisturbed
        if time.monotonic() > deadline:
            raise PeerFailed(f"{peer.name} made no new step within {START_S:g} s of a kill: {peer.last_words()}")


def _newest(steps: list[PeerStep]) -> int:
    return max((step.step for step in steps), default=0)
