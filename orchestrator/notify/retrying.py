"""What becomes of a delivery after an attempt, and of its hook: again later, over, given up; and when a hook is paused."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.domain.hooks import MAX_ATTEMPTS_KEPT, Attempt, Delivery, Fate, Standing

GONE = 410
"""The receiver says that it is to be asked no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """first_wait_s grows fourfold with each try, up to longest_wait_s; of each, between a half and the whole is waited.

    attempts: of one delivery. max_failures: deliveries given up in a row, after which the hook is paused.
    """

    attempts: int = 8
    first_wait_s: float = 5.0
    longest_wait_s: float = 3600.0
    max_failures: int = 10

    def wait_s(self, tries: int, chance: float) -> float:
        """After so many tries. chance: 0..1, so that many deliveries to one receiver do not come back at once."""
        return float(min(self.longest_wait_s, self.first_wait_s * 4.0 ** min(tries - 1, 32)) * (0.5 + 0.5 * chance))


def tried(
    delivery: Delivery, standing: Standing, attempt: Attempt, patience: Patience, now: float, chance: float
) -> tuple[Delivery, Standing]:
    """Both as they are after it."""
    tries = delivery.tries + 1
    kept = (*delivery.attempts, attempt)[-MAX_ATTEMPTS_KEPT:]
    after = replace(delivery, tries=tries, attempts=kept, due_at=None)
    if attempt.is_good:
        return replace(after, fate=Fate.DELIVERED), replace(standing, failures=0, delivered_at=now)
    if attempt.code == GONE:
        why = f"the receiver answered {GONE}: it wants no more"
        return replace(after, fate=Fate.FAILED), _paused(replace(standing, failures=standing.failures + 1), why, now)
    if tries < patience.attempts:
        return replace(after, due_at=now + patience.wait_s(tries, chance)), standing
    failed = replace(standing, failures=standing.failures + 1)
    if failed.failures < patience.max_failures:
        return replace(after, fate=Fate.FAILED), failed
    why = f"{failed.failures} deliveries in a row were given up, the last one because: {attempt.error}"
    return replace(after, fate=Fate.FAILED), _paused(failed, why, now)


def again(delivery: Delivery, now: float) -> Delivery:
    """Asked for once more by somebody: from the first try, with what was tried before kept."""
    return replace(delivery, fate=Fate.PENDING, tries=0, due_at=now)


def _paused(standing: Standing, why: str, now: float) -> Standing:
    return standing if standing.paused_at is not None else replace(standing, paused_at=now, why=why)
