"""Which faults arrive when: drawn for the whole cluster at once, each with its victim, so that cost grows with faults.

Causes and their shares are those of Llama 3 (The Llama 3 Herd of Models, 2024, table 5): 419 unplanned interruptions in
54 days on 16,384 accelerators. It refuses to know what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

DAY_S = 86400.0
LLAMA3_PER_GPU_DAY = 419 / (54 * 16_384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """times: in those 54 days. takes_machine: not only a process. repaired_s: until the machine is back.

    notice_s: between its announcement, which is what arrives, and the loss. slows: not lost, but so many times slower until
    it is repaired; 0: lost.
    """

    cause: str
    times: int
    takes_machine: bool
    repaired_s: float
    notice_s: float = 0.0
    slows: float = 0.0


LLAMA3 = (
    Mode(cause="faulty GPU", times=148, takes_machine=True, repaired_s=4 * 3600),
    Mode(cause="GPU memory", times=72 + 19 + 17, takes_machine=True, repaired_s=2 * 3600),
    Mode(cause="software", times=54 + 2, takes_machine=False, repaired_s=0),
    Mode(cause="network", times=35 + 7, takes_machine=True, repaired_s=1800),
    Mode(cause="maintenance", times=32, takes_machine=True, repaired_s=3600),
    Mode(cause="hang", times=7, takes_machine=False, repaired_s=0),
    Mode(cause="silent corruption", times=6, takes_machine=True, repaired_s=4 * 3600),
    Mode(cause="machine", times=6 + 3 + 3 + 2 + 2 + 2 + 2, takes_machine=True, repaired_s=4 * 3600),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """victim: a number of one of the cluster's blocks of accelerators that are lost together."""

    at: float
    victim: int
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotWaves:
    """Machines that their owner takes back, several within a minute, and offers again later."""

    per_day: float = 0.0
    blocks: int = 1
    away_s: float = 3600.0
    notice_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """Blocks that are taken away for a while and have been announced."""

    per_day: float = 0.0
    away_s: float = 3600.0
    notice_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """Blocks that compute more slowly for a while, because of heat or a neighbour.

    times: as long as others take, typically; by what is above 1, a quarter less to half as much again. lasts_s: on average.
    """

    per_day: float = 0.0
    times: float = 2.0
    lasts_s: float = 1800.0


def arrivals(
    rng: Random,
    *,
    days: float,
    gpus: int,
    blocks: int,
    rate: float,
    waves: SpotWaves = SpotWaves(),
    maintenance: Maintenance = Maintenance(),
    slowness: Slowness = Slowness(),
) -> list[Arrival]:
    """In order of time. rate: how many times as often as in Llama 3's cluster an accelerator fails."""
    found = []
    for at in _instants(rng, LLAMA3_PER_GPU_DAY * rate * gpus, days):
        mode = rng.choices(LLAMA3, [one.times for one in LLAMA3])[0]
        found.append(Arrival(at=at, victim=rng.randrange(blocks), mode=mode))
    spot = Mode(cause="spot", times=0, takes_machine=True, repaired_s=waves.away_s, notice_s=waves.notice_s)
    for at in _instants(rng, waves.per_day, days):
        for victim in rng.sample(range(blocks), min(waves.blocks, blocks)):
            found.append(Arrival(at=at + rng.uniform(0.0, 60.0), victim=victim, mode=spot))
    planned = Mode(
        cause="planned maintenance",
        times=0,
        takes_machine=True,
        repaired_s=maintenance.away_s,
        notice_s=maintenance.notice_s,
    )
    for at in _instants(rng, maintenance.per_day, days):
        found.append(Arrival(at=at, victim=rng.randrange(blocks), mode=planned))
    for at in _instants(rng, slowness.per_day, days):
        slow = Mode(
            cause="straggler",
            times=0,
            takes_machine=False,
            repaired_s=rng.expovariate(1 / slowness.lasts_s),
            slows=1.0 + (slowness.times - 1.0) * rng.uniform(0.75, 1.5),
        )
        found.append(Arrival(at=at, victim=rng.randrange(blocks), mode=slow))
    return sorted(found, key=lambda one: (one.at, one.victim))


def _instants(rng: Random, per_day: float, days: float) -> Iterator[float]:
    """Seconds, at random."""
    if not per_day:
        return
    at = rng.expovariate(per_day / DAY_S)
    while at < days * DAY_S:
        yield at
        at += rng.expovariate(per_day / DAY_S)
