"""Which devices have become slow, judged by how long they compute for a micro-batch: against others of their kind that do
the same, and against their own past. Pure; it learns from one report to the next, and never from what it takes for slow.

    a report is slow      SLOW_X or more of what is usual for its kind, and of what was usual for itself
    a device is slow      all its reports for PATIENCE_S and MIN_STEPS steps, twice as long each time it was found before
    it is well again      all its reports at most WELL_X of what was usual, as long

Whoever is alone of its kind is judged by its past alone, who has none by its kind alone. The gap between the two limits and
the growing patience keep a device that comes and goes from being believed each time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from orchestrator.domain.balance import Straggler
from orchestrator.domain.ids import Device, Generation, Step

SLOW_X, WELL_X = 1.5, 1.2
PATIENCE_S, MAX_PATIENCE_S = 4.0, 600.0
MIN_STEPS = 4
KEPT = 3
"""Reports whose median counts: one that is odd is none."""
LEARNED = 4
"""Reports after which a device has a past."""
ADAPTS = 0.1
"""Share of a new report in what is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A report: seconds per layer and micro-batch, the newest committed step and the wall clock of when it came."""

    seconds: float
    step: Step
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A device in one generation. work: what it does, so that those that do the same can be compared."""

    generation: Generation
    work: str
    reports: tuple[float, ...] = ()
    num_reports: int = 0
    usual_s: float = 0.0
    """0.0 where it has no past."""
    odd_since: Seen | None = None
    """Since when its reports say, one and all, that it is not what it is taken for."""

    @property
    def seconds(self) -> float:
        """Lately; 0.0 where it has said nothing in this generation."""
        return median(self.reports) if self.reports else 0.0


def look(
    tracks: Mapping[Device, Track],
    reports: Mapping[Device, Seen],
    work: Mapping[Device, str],
    generation: Generation,
    known: Mapping[Device, Straggler],
) -> tuple[dict[Device, Track], dict[Device, Straggler]]:
    """What is known after these reports: of every device, and what has changed about stragglers.

    work: of every device of the generation, kind and layers; known: devices that are slow, or were.
    """
    found = {device: _in_generation(tracks.get(device), generation, work[device]) for device in work}
    for device, seen in reports.items():
        if device in found:
            track = found[device]
            latest = (*track.reports, seen.seconds)[-KEPT:]
            found[device] = replace(track, reports=latest, num_reports=track.num_reports + 1)
    kinds = usual_of(found, known)
    changed = {}
    for device, seen in reports.items():
        if device in found:
            straggler = known.get(device)
            alike = kinds.get(found[device].work, {})
            others = [seconds for other, seconds in alike.items() if other != device]
            found[device], verdict = _judge(found[device], seen, median(others) if others else 0.0, straggler)
            if verdict is not None:
                changed[device] = verdict
    return found, changed


def usual_of(tracks: Mapping[Device, Track], known: Mapping[Device, Straggler]) -> dict[str, dict[Device, float]]:
    """By what they do: what devices that are not slow take for a layer of a micro-batch."""
    found: dict[str, dict[Device, float]] = defaultdict(dict)
    for device, track in tracks.items():
        if track.reports and not (device in known and known[device].is_slow):
            found[track.work][device] = track.seconds
    return found


def patience_s(times: int) -> float:
    """How long reports must agree about a device that was found slow so often before."""
    return float(min(MAX_PATIENCE_S, PATIENCE_S * 2.0 ** min(times, 16)))


def _in_generation(track: Track | None, generation: Generation, work: str) -> Track:
    """Its past is worth something as long as it does the same work."""
    if track is not None and track.generation == generation:
        return track
    is_same = track is not None and track.work == work
    return Track(generation=generation, work=work, usual_s=track.usual_s if track is not None and is_same else 0.0)


def _judge(track: Track, seen: Seen, kind_s: float, known: Straggler | None) -> tuple[Track, Straggler | None]:
    """kind_s: what others that do the same take; 0.0 where there are none."""
    now_s, is_slow = track.seconds, known is not None and known.is_slow
    if is_slow:
        assert known is not None
        usual_s = known.usual_s
        is_odd = now_s <= WELL_X * max(usual_s, kind_s)
    else:
        track = _learn(track, kind_s)
        usual_s = max(track.usual_s, kind_s)
        is_odd = usual_s > 0.0 and now_s >= SLOW_X * usual_s
    if not is_odd:
        return replace(track, odd_since=None), None
    since = track.odd_since or seen
    track = replace(track, odd_since=since)
    times = known.times if known is not None else 0
    agreed_s = patience_s(times - 1 if is_slow else times)
    if seen.step - since.step < MIN_STEPS or seen.at - since.at < agreed_s:
        return track, None
    track = replace(track, odd_since=None)
    if is_slow:
        assert known is not None
        return replace(track, usual_s=usual_s), replace(known, is_slow=False, factor=1.0, since=seen.at)
    return track, Straggler(usual_s=usual_s, factor=now_s / usual_s, since=seen.at, times=times + 1)


def _learn(track: Track, kind_s: float) -> Track:
    if not track.usual_s:
        is_like_others = not kind_s or track.seconds <= WELL_X * kind_s
        is_known = track.num_reports >= LEARNED and is_like_others
        return replace(track, usual_s=track.seconds) if is_known else track
    if track.seconds <= WELL_X * track.usual_s:
        return replace(track, usual_s=(1 - ADAPTS) * track.usual_s + ADAPTS * track.seconds)
    return track
