"""A supervisor begins: whether its store has forgotten what hosts remember, and each job's truth where it has.

It owns that judgement alone. How hosts are asked and how the store is told is the loop's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Kept, Memo, Reign, is_forgotten

from .arbitrating import claimed

EFFECTS = 1_000_000
"""More than one supervisor ever asks for: effects of one that was forgotten are never taken for those of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """jobs: each as it was recorded last. strays: hosts that serve what came to nothing, and are to end.

    used: devices of jobs that hosts remember better: what an older quarantine says of them is outdated.
    above, commits: the highest term and number of a commit that anybody has heard of.
    """

    jobs: Mapping[JobId, JobRecord]
    strays: frozenset[tuple[JobId, NodeId]]
    used: frozenset[Device]
    reigns: tuple[Reign, ...]
    """Those that led to these jobs; the new supervisor's, which knew of nothing, is none of them."""
    above: Term
    commits: int


def recalled(
    jobs: Mapping[JobId, JobRecord],
    over: Collection[JobId],
    kept: Sequence[Kept],
    reigns: Sequence[Reign],
    commits: int,
) -> Recalled | None:
    """None where no host remembers more than the store.

    jobs: as loaded; over: those that have ended; reigns: of the store, the new supervisor's last.
    """
    forgotten = [one.memo for one in kept if one.memo is not None and is_forgotten(one.memo, reigns)]
    term = reigns[-1].term
    above = max([term, *(one.term for one in kept)])
    if not forgotten and above == term:
        return None
    found, strays, used = dict(jobs), set[tuple[JobId, NodeId]](), set[Device]()
    newest: dict[JobId, Memo] = {}
    led_here = {one.by: one for one in reigns[:-1]}
    for job in {one.job: None for one in kept if one.memo is not None}:
        mine = [one for one in kept if one.job == job]
        memo = newest[job] = _newest(mine)
        is_news = job not in over and is_forgotten(memo, reigns) and not _is_overtaken(memo, jobs.get(job), reigns)
        led = memo.reigns if is_news else reigns
        strays |= {(job, one.node) for one in mine if one.memo is not None and is_forgotten(one.memo, led)}
        if is_news:
            heard = Generation(max(memo.record.reserved, *(one.heard for one in mine)))
            effect = max(memo.record.next_effect, (above + 1) * EFFECTS)
            led_here |= {one.by: one for one in memo.reigns}
            used |= claimed(memo.record)
            found[job] = memo.record.changed({"reserved": heard, "next_effect": effect})
    _part(found, newest, strays)
    highest = max([commits, *(memo.commits for memo in forgotten)])
    return Recalled(
        jobs=found,
        strays=frozenset(strays),
        used=frozenset(used),
        reigns=tuple(sorted(led_here.values(), key=lambda one: one.at)),
        above=above,
        commits=highest,
    )


def _newest(kept: Sequence[Kept]) -> Memo:
    """Of those whose ranks train the latest, or what the same supervisor or a later one went on to from there."""
    memos = [(one.at_work, one.memo) for one in kept if one.memo is not None]
    _, best = max(memos, key=lambda one: (one[0] > 0, one[1].mark))
    return max((memo for _, memo in memos if not is_forgotten(best, memo.reigns)), key=lambda one: one.mark)


def _is_overtaken(memo: Memo, record: JobRecord | None, reigns: Sequence[Reign]) -> bool:
    """Whether a later supervisor, which did not know of it, has got further with the job."""
    if record is None or not any(one.at > memo.reigns[-1].at for one in reigns[:-1]):
        return False
    return (record.generation, record.committed) > (memo.record.generation, memo.record.committed)


def _part(jobs: Mapping[JobId, JobRecord], newest: Mapping[JobId, Memo], strays: set[tuple[JobId, NodeId]]) -> None:
    """Of two jobs that have the same device, the one that was recorded first has lost it since."""
    taken: set[Device] = set()
    order = sorted(jobs, key=lambda job: (newest[job].mark if job in newest else (0.0, 0, ""), job), reverse=True)
    for job in order:
        mine = claimed(jobs[job])
        strays |= {(job, device.node) for device in mine & taken}
        taken |= mine
