"""Whether another share of the work is worth what changing to it costs: fewer ids first, then fewer layers,
then a spare in its place.

    worth it   it makes a step shorter by GAIN or more, and pays for its pause within HORIZON_S (or what is left of the job)
    in order   the first remedy that is worth it is taken; the next is looked at when that has shown what it is worth
    bounded    at most MAX_CHANGES an hour

It knows nothing of how shares are computed, nor of what made a device slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.domain.balance import Remedy

GAIN = 0.07
"""Of a step: less may be an error of measurement."""
HORIZON_S = 600.0
"""As long as speeds are expected to last."""
MAX_CHANGES, WITHIN_S = 6, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """gain_s: by how much it makes a step of step_s seconds shorter; pause_s: what changing to it is expected to cost."""

    remedy: Remedy
    gain_s: float
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """why_not: of every offer that comes before the one taken; taken is None where there is none."""

    taken: Offer | None
    why_not: tuple[str, ...] = ()


def choose(offers: Sequence[Offer], step_s: float, steps_left: int) -> Choice:
    """offers: in the order in which they are to be tried; steps_left: of the job."""
    reasons: list[str] = []
    for offer in offers:
        why = _why_not(offer, step_s, steps_left)
        if not why:
            return Choice(taken=offer, why_not=tuple(reasons))
        reasons.append(f"{offer.remedy}: {why}")
    return Choice(taken=None, why_not=tuple(reasons))


def recent(changes: Sequence[float], now: float) -> tuple[float, ...]:
    """Instants of changes that count towards the bound."""
    return tuple(at for at in changes if abs(now - at) < WITHIN_S)


def _why_not(offer: Offer, step_s: float, steps_left: int) -> str:
    if offer.gain_s < GAIN * step_s:
        return f"a step of {step_s:.3g} s would be {offer.gain_s * 1e3:.0f} ms shorter, less than {GAIN:.0%}"
    steps = min(steps_left, HORIZON_S / max(step_s - offer.gain_s, 1e-9))
    if offer.gain_s * steps <= offer.pause_s:
        return f"{offer.gain_s * steps:.3g} s would be won, and the change costs {offer.pause_s:.3g} s"
    return ""
