"""What a planner is asked and what it answers, as values: constraints in, proposals with reasons out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.domain.kinds import GIB

from .compose import Limits, Member
from .constants import Constants, Measured
from .cost import Breakdown
from .machines import ClassKey, Machines
from .memory import Rules
from .model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's samples: `micro_batches` ids of `samples` each."""

    samples: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    model: Model
    machines: Machines
    batches: tuple[Batch, ...]
    """To choose from: the same number of samples in all, cut differently."""
    tp: int | None = None
    limits: Limits = Limits()
    recompute: tuple[bool, ...] = (False,)
    rules: Rules = Rules()
    constants: Constants = Constants()
    measured: Measured = Measured()
    uneven: bool = False
    """Plans may give replicas unequal shares of the state, where equal ones do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One way to run a step. members: of pipelines, by class; which nodes they are on is for placement."""

    tp: int
    batch: Batch
    recompute: bool
    keys: tuple[ClassKey, ...]
    """What a track's class indices mean."""
    members: tuple[Member, ...]
    breakdown: Breakdown
    """Of the pipeline that ends last."""
    memory: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Kind -> bytes of its fullest device, and bytes it has."""
    is_uneven: bool = False
    """It fits only where those with more memory own more of the state: placed, its mirrors may still be in the way."""
    bound_s: float = 0.0
    """No plan on these devices is faster: all of them computing all the time, and nothing else."""
    why: str = ""
    """What it lost by; empty for the one that won."""

    @property
    def seconds(self) -> float:
        return self.breakdown.total

    @property
    def replicas(self) -> int:
        return sum(len(member.ids) for member in self.members)

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(sorted({member.track.depth for member in self.members}))

    @property
    def num_devices(self) -> int:
        return self.tp * sum(member.track.depth * len(member.ids) for member in self.members)

    def groups(self) -> dict[ClassKey, int]:
        """tp groups it takes of each class."""
        taken = dict.fromkeys(self.keys, 0)
        for member in self.members:
            for index, number in enumerate(member.track.counts):
                taken[self.keys[index]] += number * len(member.ids)
        return taken

    def shape(self) -> str:
        depths = "pp" + "/".join(str(depth) for depth in self.depths)
        again = ", recomputing" if self.recompute else ""
        return f"tp{self.tp} x {depths} x dp{self.replicas}, micro-batches of {self.batch.samples}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """proposals: the best first, three at most. losers: what else was tried and why it lost, in words."""

    proposals: tuple[Proposal, ...]
    losers: tuple[str, ...]
    tried: int

    @property
    def best(self) -> Proposal:
        return self.proposals[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Fact, limit, remedy. forever: no cluster could."""

    reason: str
    forever: bool = False


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
