"""How often each caller may ask: token buckets in memory, of the callers that asked lately.

Knows nothing of HTTP and reads no clock. Each API process counts for itself, so two of them allow twice as much.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_CALLERS = 10_000
"""The one that asked longest ago is forgotten first; it then has a full bucket again."""


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at: float


class Rates:
    """per_s: how fast a bucket fills, burst: how much it holds."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_s(self, caller: str, now: float) -> float:
        """Takes one and answers 0; where there is none, seconds until there is."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = _Bucket(self._burst, now)
            if len(self._buckets) > MAX_CALLERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(caller)
        bucket.level = min(self._burst, bucket.level + (now - bucket.filled_at) * self._per_s)
        bucket.filled_at = now
        if bucket.level >= 1:
            bucket.level -= 1
            return 0.0
        return (1 - bucket.level) / self._per_s

    def is_empty(self, caller: str, now: float) -> float:
        """Seconds until it has one, taking nothing."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            return 0.0
        level = min(self._burst, bucket.level + (now - bucket.filled_at) * self._per_s)
        return 0.0 if level >= 1 else (1 - level) / self._per_s
