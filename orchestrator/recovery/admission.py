"""Whether a node is fit to be used, as it comes, goes, is accused and is checked: from one value to the next.

new, back, accused ──> checking ──all is well──> admitted
                          `─────something is wrong, or nobody answers──> refused ──parole──> checking
admitted ──goes away FLAPS times within FLAPS_WITHIN_S──> refused

Every refusal is a strike, and doubles the time to the next parole; strikes are forgotten after REMEMBERED_S. Only a node
whose devices could not be tried gets none: it is busy or set up otherwise, and not broken. It knows nothing of how a check
is made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from statistics import median

from orchestrator.domain.admission import Admission, Admittance, Checked
from orchestrator.domain.ids import NodeId
from orchestrator.domain.kinds import KINDS, Kinds

CHECK_S = 5.0
"""What a check may take, and how long jobs wait for one rather than plan without the node."""
ASK_AGAIN_S = 60.0
"""More than a check takes that has an answer at all (adapters/checking.py): one that is only slow is heard, not begun anew
beside the first."""
MAX_UNANSWERED = 3
SLOW_X = 4.0
"""Times what others of its kind take: a machine that is that slow is broken, not busy. Stragglers are found otherwise."""
PEERS = 2
"""Others of its kind that must have been measured."""
KIND_SHARE = 0.2
"""Of its kind's peak that a large product reaches at least."""
FLAPS, FLAPS_WITHIN_S = 6, 600.0
PAROLE_S, MAX_PAROLE_S = 60.0, 3600.0
REMEMBERED_S = 24 * 3600.0
ACCUSED_AGAIN_S = 60.0
"""A node that has just been checked is not checked again for the next fault."""


def is_new(node: NodeId, life: str, now: float) -> Admission:
    return Admission(node=node, since=now, life=life, why="it is new")


def came_back(known: Admission, life: str, now: float) -> Admission:
    """It is seen again: another start is checked anew, one that was only silent stands as it stood, unless it flaps."""
    ends = tuple(at for at in known.ends if abs(now - at) < FLAPS_WITHIN_S)
    here = replace(known, is_here=True, is_lost=False, ends=ends)
    if len(ends) >= FLAPS and known.standing is not Admittance.REFUSED:
        why = f"it went away {len(ends)} times within {FLAPS_WITHIN_S / 60:.0f} minutes"
        return refused(replace(here, life=life, ends=()), why, now)
    if known.is_lost or (life and known.life and life != known.life):
        return replace(checking(replace(here, life=life), "it was started again", now), was_admitted=False)
    return replace(here, life=life or known.life)


def went_away(known: Admission, is_lost: bool, now: float) -> Admission:
    ends = (*known.ends, now)[-FLAPS:] if known.is_here else known.ends
    return replace(known, is_here=False, is_lost=is_lost or known.is_lost, ends=ends)


def accused(known: Admission, why: str, suspects: tuple[NodeId, ...], now: float) -> Admission:
    """A fault points at it. What has been said lately, or is about to be, stands."""
    if known.standing is not Admittance.ADMITTED or 0 <= now - known.since < ACCUSED_AGAIN_S:
        return known
    return replace(checking(known, why, now), suspects=suspects)


def checking(known: Admission, why: str, now: float) -> Admission:
    return replace(
        known,
        standing=Admittance.CHECKING,
        since=now,
        why=why,
        was_admitted=known.was_admitted or known.standing is Admittance.ADMITTED,
        asked_at=None,
        unanswered=0,
        peer=None,
        failed=(),
        suspects=(),
    )


def answered(
    known: Admission,
    found: Checked,
    kind: str,
    peers: Collection[float],
    others: bool,
    now: float,
    table: Kinds = KINDS,
) -> Admission:
    """A check has come back. peers: what products take others of its kind; others: whether another peer is left to try."""
    known = replace(known, said=found.said, product_s=found.product_s, tflops=found.tflops, asked_at=None, unanswered=0)
    wrong = [*found.wrong, *_too_slow(found, kind, peers, table)]
    if wrong:
        return refused(known, "; ".join([*wrong, *found.untried]), now)
    if found.untried:
        return turned_away(known, "; ".join(found.untried), now)
    if found.pair_wrong and known.peer is not None:
        known = replace(known, failed=(*known.failed, known.peer))
        if others:
            return known
        # One peer's word against that of a node that was fit a moment ago shows nothing about either.
        if len(known.failed) > 1 or not known.was_admitted:
            return refused(known, found.pair_wrong, now)
    why = f"nothing passes between it and {', '.join(known.failed)}" if known.failed else ""
    return replace(known, standing=Admittance.ADMITTED, since=now, why=why)


def unanswered(known: Admission, now: float) -> Admission:
    """Nothing came back in time, which is asked a few times."""
    times = known.unanswered + 1
    known = replace(known, unanswered=times, asked_at=None)
    return known if times < MAX_UNANSWERED else refused(known, f"{times} checks in a row were not answered", now)


def refused(known: Admission, why: str, now: float) -> Admission:
    strikes = known.strikes + 1 if 0 <= now - known.struck_at < REMEMBERED_S else 1
    return replace(
        known, standing=Admittance.REFUSED, since=now, why=why, strikes=strikes, struck_at=now, asked_at=None, unanswered=0
    )


def turned_away(known: Admission, why: str, now: float) -> Admission:
    """Refused, and nothing is held against it: what is in the way may be gone the next time it is looked at."""
    return replace(known, standing=Admittance.REFUSED, since=now, why=why, asked_at=None, unanswered=0)


def parole_s(known: Admission) -> float:
    """How long a refused node is left alone."""
    return min(MAX_PAROLE_S, PAROLE_S * 2.0 ** max(0, min(known.strikes - 1, 16)))


def is_forgettable(known: Admission, now: float) -> bool:
    """Of a node that is not there any more."""
    has_strikes = known.strikes > 0 and 0 <= now - known.struck_at < REMEMBERED_S
    return not has_strikes and not any(0 <= now - at < FLAPS_WITHIN_S for at in known.ends)


def _too_slow(found: Checked, kind: str, peers: Collection[float], table: Kinds) -> list[str]:
    wrong = []
    if len(peers) >= PEERS and found.product_s > SLOW_X * (usual := median(peers)) > 0:
        times = found.product_s / usual
        wrong.append(
            f"a product of matrices takes {times:.2g} times as long as on other {kind} nodes, the limit is {SLOW_X:g}"
        )
    known = table.get(kind)
    if found.tflops and known is not None and kind != "cpu" and found.tflops < KIND_SHARE * known.bf16_tflops:
        least = KIND_SHARE * known.bf16_tflops
        wrong.append(f"a large product runs at {found.tflops:.3g} TFLOP/s, a {kind} reaches {least:.3g} at the very least")
    return wrong
