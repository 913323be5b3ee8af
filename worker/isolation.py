"""What a host does when no supervisor has spoken to it for long: the one decision it takes by itself.

Pure: instants are arguments. Steps that commit need every rank of the generation, so healthy ranks train on although nobody
can reach them; ranks that commit nothing any more hold their devices for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

GRACE_S = 60.0
"""A host nobody speaks to leaves its ranks alone at least this long, whatever they do: a supervisor may be restarting."""
FORSAKEN_S = 60.0
"""Beyond max_isolation_s: by then whoever is in charge counts this host as gone."""
SLEPT_S = 10.0
"""A host that is asked to judge less often than this was stopped itself, or its machine was."""
_STEPS_OF_PATIENCE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    reason: str
    spares_finished: bool
    """A finished rank commits nothing by nature and may hold the only copy of the result."""


@dataclass(slots=True, kw_only=True)
class Isolation:
    """All instants are seconds of one monotonic clock."""

    heard_at: float
    moved_at: float
    """When a step was last committed, or a generation formed."""
    grace_s: float = GRACE_S
    longest_step_s: float = 0.0
    judged_at: float | None = None

    def hear(self, now: float) -> None:
        self.heard_at = now

    def move(self, now: float) -> None:
        self.moved_at = now

    def commit(self, now: float) -> None:
        self.longest_step_s = max(self.longest_step_s, now - self.moved_at)
        self.moved_at = now

    def is_forsaken(self, now: float, max_isolation_s: float) -> bool:
        """Whether the host itself is to end: its job may be over, and it keeps others from its devices."""
        return 0 < max_isolation_s < now - self.heard_at - FORSAKEN_S

    def judge(self, now: float, max_isolation_s: float) -> Verdict | None:
        """Why ranks must be ended now, if they must; max_isolation_s 0 means that healthy ones never are."""
        if self.judged_at is not None and now - self.judged_at > SLEPT_S:
            # Nobody here has run meanwhile, ranks no more than this host: that is no standing still.
            self.moved_at += now - self.judged_at
        self.judged_at = now
        silent_s, still_s = now - self.heard_at, now - self.moved_at
        if 0 < max_isolation_s < silent_s:
            return Verdict(
                reason=f"no supervisor was heard for {silent_s:.0f} s and the job allows {max_isolation_s:g} s",
                spares_finished=False,
            )
        if silent_s > self.grace_s and still_s > max(self.grace_s, _STEPS_OF_PATIENCE * self.longest_step_s):
            return Verdict(
                reason=f"no supervisor was heard for {silent_s:.0f} s and no step was committed for {still_s:.0f} s",
                spares_finished=True,
            )
        return None
