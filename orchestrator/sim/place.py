"""What everybody in the simulated world shares: time, chance, the scenario, what is cut off, and notes of what happens.

It refuses to know who lives there, so that whoever does can be read, and imported, without all the others.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step

from .clock import Clock
from .memory import Flip
from .scenario import Scenario


class Place:
    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.rng = Random(f"world {scenario.seed}")
        self.clock = Clock()
        self.lines: list[str] = []
        self._print = trace
        self.checkpoints: dict[JobId, set[CheckpointRef]] = defaultdict(set)
        self.shards: set[tuple[JobId, Generation, Step, Device]] = set()
        """That are durable, of checkpoints that may never be committed."""
        self.cut_links: set[tuple[Device, Device]] = set()
        """Between these nothing arrives; a connection stays open."""
        self.unplugged: set[NodeId] = set()
        """Nothing that these send arrives anywhere, and nothing arrives there."""
        self.doomed_donors: set[JobId] = set()
        """Jobs whose next transfer costs a donor its life."""
        self.not_finite: set[tuple[JobId, Step]] = set()
        """Steps that came out as NaN once."""
        self.slow: dict[Device, float] = {}
        """How many times longer these take to compute."""
        self.damaged: set[str] = set()
        """Checkpoints that nobody can read."""
        self.forged: dict[str, Flip] = {}
        """Checkpoints that are not what was saved: what is wrong in the memory of whoever holds that element."""
        self.has_forgotten = False
        """The store has gone back at least once."""
        self._last_pid = 100

    def note(self, line: str) -> None:
        text = f"{self.clock.now:9.3f}  {line}"
        self.lines.append(text)
        if self._print:
            print(text)

    def next_pid(self) -> int:
        self._last_pid += 1
        return self._last_pid

    def paths(self, job: JobId) -> set[str]:
        """Of the checkpoints that are there."""
        return {one.path for one in self.checkpoints[job]}
