"""What things take in a fleet, and what has come of its weeks: plain data, for those who simulate and those who tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.domain.ids import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What things take, in seconds: of the order that benchmarks.recovery measures on one machine.

    step_s: a step at full strength. bytes_s: what one machine sends or receives. state_bytes: of one element, all kinds.
    """

    step_s: float
    detect_s: float = 0.02
    hang_s: float = 0.7
    commit_s: float = 0.004
    plan_s: float = 0.05
    leave_s: float = 0.02
    form_s: float = 0.06
    first_s: float = 0.0
    """By which the first step of a generation takes longer than others, from when its last rank is ready."""
    fork_s: float = 0.05
    open_s: float = 30.0
    build_s: float = 5.0
    bytes_s: float = 50e9
    read_bytes_s: float = 2e9
    element_bytes: float = 12.0
    noticed_s: float = 5.0
    """Until the cluster says that a machine is lost."""


@dataclass(slots=True)
class Tally:
    """What has happened so far. Seconds of training lost to each cause, and what recoveries came to."""

    began: Step = Step(0)
    committed: Step = Step(0)
    """Steps since then, those that were run again counted once."""
    rerun_s: float = 0.0
    rolled_back: int = 0
    pauses: list[tuple[str, float]] = field(default_factory=list)
    lost_s: dict[str, float] = field(default_factory=dict)
    moved_bytes: float = 0.0
    rungs: dict[str, int] = field(default_factory=dict)
    decisions: list[tuple[object, ...]] = field(default_factory=list)
    kernel_steps: int = 0
    faults: int = 0

    def lose(self, cause: str, seconds: float) -> None:
        self.lost_s[cause] = self.lost_s.get(cause, 0.0) + seconds
