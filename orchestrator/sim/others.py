"""Other systems on the same trace of faults, in a few lines each: no decision of ours is made twice.

`restart`: everything again from the newest checkpoint. `shrink`: the data-parallel group that lost a machine is away until
it has been restarted, the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from .arrivals import DAY_S, Arrival
from .report import Report, report_of
from .scene import WhatIf


def restart(scene: WhatIf, trace: Sequence[Arrival]) -> Report:
    """Goes on with the groups that are whole, and is started once more when a machine has come back."""
    total, interval, groups = scene.days * DAY_S, scene.checkpoint_every * scene.paced_s, _groups(scene)
    lost: dict[str, float] = {}
    starts = []
    """When, for how long, why, and whether what was learned had just been saved."""
    for one, absent_s in away(scene, trace):
        at = one.at + one.mode.notice_s
        starts.append(
            (at, scene.restart_s + (0.0 if one.mode.notice_s else scene.detect_s), one.mode.cause, one.mode.notice_s > 0)
        )
        if absent_s:
            starts.append((at + absent_s, scene.restart_s, one.mode.cause, False))
            _add(lost, one.mode.cause, min(absent_s, max(0.0, total - at)) / groups)
    _wait_for_the_slow(scene, trace, lost)
    pauses, rolled, free_at, saved_at = [], 0.0, 0.0, 0.0
    for at, pause, cause, is_saved in sorted(starts):
        if at < free_at or at >= total:
            continue  # while everything starts anyway
        trained = at - saved_at
        rolled += 0.0 if is_saved else trained % interval if interval else trained
        _add(lost, cause, pause)
        pauses.append(pause)
        free_at = saved_at = at + pause
    steps = int(max(0.0, total - sum(lost.values()) - rolled) / scene.paced_s)
    return report_of(
        scene, "restart", steps=steps, faults=len(trace), lost=lost, rerun_s=rolled,
        rolled_back=int(rolled / scene.paced_s), pauses=pauses, moved_gb=12 * scene.params * len(pauses) / 1e9, rungs={},
    )  # fmt: skip


def shrink(scene: WhatIf, trace: Sequence[Arrival]) -> Report:
    """A group is away until its machine has been replaced and has started; the others agree on who is left, and go on."""
    total, groups = scene.days * DAY_S, _groups(scene)
    lost: dict[str, float] = {}
    away_until: dict[int, float] = {}
    """By group."""
    struck = away(scene, trace)
    for one, absent_s in struck:
        group, at = one.victim // scene.pp, one.at + one.mode.notice_s
        until = min(total, at + scene.detect_s + scene.restart_s + absent_s)
        more_s = max(0.0, until - max(at, away_until.get(group, 0.0)))
        away_until[group] = max(until, away_until.get(group, 0.0))
        _add(lost, one.mode.cause, scene.requorum_s + more_s / groups)
    _wait_for_the_slow(scene, trace, lost)
    rerun = scene.paced_s / 2 * len(struck)
    steps = int(max(0.0, total - sum(lost.values()) - rerun) / scene.paced_s)
    return report_of(
        scene, "shrink", steps=steps, faults=len(trace), lost=lost, rerun_s=rerun, rolled_back=0,
        pauses=[scene.requorum_s] * len(struck), moved_gb=12 * scene.params / groups * len(struck) / 1e9, rungs={},
    )  # fmt: skip


def away(scene: WhatIf, trace: Sequence[Arrival]) -> list[tuple[Arrival, float]]:
    """Each fault, and for how many seconds nobody is there in the place of a machine that it took: 0 where a spare is."""
    idle_at = [0.0] * scene.spares
    found = []
    for one in (one for one in trace if not one.mode.slows):
        absent_s = 0.0
        if one.mode.takes_machine:
            lost_at = one.at + one.mode.notice_s
            back_at = lost_at + one.mode.repaired_s
            first = min(range(len(idle_at)), key=idle_at.__getitem__, default=None)
            if first is not None and idle_at[first] <= back_at:
                absent_s = max(0.0, idle_at[first] - lost_at)
                idle_at[first] = back_at
            else:
                absent_s = one.mode.repaired_s
        found.append((one, absent_s))
    return found


def _wait_for_the_slow(scene: WhatIf, trace: Sequence[Arrival], lost: dict[str, float]) -> None:
    """Every step takes as long as its slowest device; where several are slow at a time, as the first of them."""
    free_at = 0.0
    for one in (one for one in trace if one.mode.slows):
        until = min(scene.days * DAY_S, one.at + one.mode.repaired_s)
        _add(lost, one.mode.cause, max(0.0, until - max(free_at, one.at)) * (1 - 1 / one.mode.slows))
        free_at = max(free_at, until)


def _groups(scene: WhatIf) -> int:
    return max(1, scene.blocks // scene.pp)


def _add(lost: dict[str, float], cause: str, seconds: float) -> None:
    lost[cause] = lost.get(cause, 0.0) + seconds
