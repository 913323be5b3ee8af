"""Who gets which devices: what holds of every answer, whatever jobs hold and want, and what rules say in single cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.ids import Device, JobId, NodeId
from orchestrator.domain.queue import WaitReason
from orchestrator.jobs.arbitration import Arbitration, Claim, Snapshot, arbitrate
from orchestrator.jobs.picking import Need, pick

NODES = (3, 2, 2, 1)
DEVICES = {Device(NodeId(f"n{n}"), i): ("A100", "H100")[n % 2] for n, size in enumerate(NODES) for i in range(size)}


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Jobs that hold parts of the cluster, as they may have come to it, and others that wait."""
    free, claims = sorted(DEVICES), []
    for number in range(draw(st.integers(1, 6))):
        need = Need(
            least=draw(st.integers(1, 5)), tp=draw(st.sampled_from((1, 1, 2))), one_kind=draw(st.integers(0, 3)) == 0
        )
        claim = Claim(
            job=JobId(f"j{number}"),
            priority=draw(st.integers(0, 2)),
            submitted_at=float(draw(st.integers(0, 3))),
            project=draw(st.sampled_from(("a", "b"))),
            need=need,
            limit=draw(st.sampled_from((0, 0, 2, 6))),
            floor=draw(st.sampled_from((0, 0, 0, 4))),
        )
        held = (
            frozenset(draw(st.lists(st.sampled_from(free), unique=True))) if free and draw(st.booleans()) else frozenset()
        )
        free = [device for device in free if device not in held]
        if not held:
            claims.append(replace(claim, wants=True, grows=True))
            continue
        core = frozenset(draw(st.lists(st.sampled_from(sorted(held)), unique=True, min_size=1)))
        leaving = held if draw(st.integers(0, 4)) == 0 else frozenset()
        ends = bool(leaving) and draw(st.booleans())
        if not leaving and draw(st.integers(0, 2)) == 0:  # a fault has broken it
            claims.append(replace(claim, holds=held, wants=True, grows=True, is_stuck=draw(st.booleans())))
            continue
        calm = not leaving and draw(st.booleans())
        claims.append(replace(claim, holds=held, core=core, leaving=leaving, ends=ends, gives=calm, grows=calm))
    quotas = {"a": draw(st.integers(0, 6))} if draw(st.booleans()) else {}
    return Snapshot(devices=DEVICES, claims=tuple(claims), quotas=quotas)


def useless(answer: Arbitration, claim: Claim) -> int:
    """Devices of a broken job that are in no group it can use, and are left for others as soon as it has those."""
    minimum = answer.allotments[claim.job].minimum
    return len(claim.holds - minimum) if claim.wants and minimum else 0


@given(snapshots())
@settings(max_examples=400, deadline=None)
def test_whatever_jobs_hold_and_want(snapshot: Snapshot) -> None:
    answer = arbitrate(snapshot)
    of = {claim.job: claim for claim in snapshot.claims}
    assert arbitrate(replace(snapshot, claims=tuple(reversed(snapshot.claims)))) == answer, "whatever their order"

    granted = Counter(device for one in answer.allotments.values() for device in one.grant)
    granted.update(answer.left)
    assert not granted or max(granted.values()) == 1, "no device twice"

    for job, one in answer.allotments.items():
        claim = of[job]
        if claim.wants and not claim.holds:
            assert bool(one.wait) == (not one.grant), "its minimum, or nothing"
            if one.grant:
                assert pick(dict.fromkeys(one.minimum, 0), claim.need, DEVICES), "a minimum has the shape it needs"
                assert one.minimum <= one.grant
        if claim.wants and claim.holds and (one.yields or one.is_put_aside):
            assert claim.is_stuck and one.is_put_aside and one.yields_to is not None, "all, and only after it has waited"
            other = of[one.yields_to]
            assert other.priority > claim.priority or (other.is_stuck and other.wants), "nobody's turn is taken"
            assert pick(dict.fromkeys(answer.allotments[other.job].grant, 0), other.need, DEVICES), "who can go on with it"
            lacks = replace(claim.need, least=max(claim.need.least, claim.floor))
            is_limited = bool(claim.limit) and claim.limit < lacks.num_devices
            assert is_limited or not pick(dict.fromkeys(claim.holds, 0), lacks, DEVICES), "it could go on itself"
        elif one.yields and not claim.leaving:
            assert one.yields_to is not None and of[one.yields_to].priority > claim.priority and claim.gives
            left = dict.fromkeys(one.grant & claim.core, 0)
            if not one.is_put_aside and one.yields & claim.core:
                assert pick(left, claim.need, DEVICES), "who yields can go on with what is left"
        if claim.limit and not claim.holds:
            assert len(one.grant) <= claim.limit
    for project, quota in snapshot.quotas.items():
        mine = [claim for claim in snapshot.claims if claim.project == project]
        had = sum(len(claim.holds) for claim in mine)
        has = sum(len(answer.allotments[claim.job].grant | claim.holds) - useless(answer, claim) for claim in mine)
        assert has <= max(quota, had), "a quota is never exceeded by what is granted"


@given(snapshots())
@settings(max_examples=200, deadline=None)
def test_nobody_takes_what_one_before_it_waits_for(snapshot: Snapshot) -> None:
    """Of jobs that could start on what is free, the first in the queue is never passed by."""
    answer = arbitrate(snapshot)
    of = {claim.job: claim for claim in snapshot.claims}
    held = {device for claim in snapshot.claims for device in claim.holds}
    free = {device: 0 for device in DEVICES if device not in held}
    blocked = [job for job in answer.order if (w := answer.allotments[job].wait) and w.reason is WaitReason.BUSY]
    broken = {claim.job for claim in snapshot.claims if claim.wants and claim.holds}  # these get what is free first
    for job in blocked[:1] if not broken & set(blocked[:1]) else ():
        after = [other for other in answer.order[answer.order.index(job) :] if other not in broken]
        given_later = {device for other in after for device in answer.allotments[other].grant - of[other].holds}
        before = {d for o in answer.order if o not in after for d in answer.allotments[o].grant}
        usable = {device: 0 for device in free if device not in before}
        best = pick(usable | {d: 1 for d in DEVICES if d not in usable}, of[job].need, DEVICES)
        assert best is not None
        if not of[job].floor:
            assert not given_later & best, "what it will start on is kept for it"


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 5), st.sampled_from((1, 1, 2)), st.integers(1, 6)),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=150, deadline=None)
def test_every_job_of_one_priority_starts_where_all_of_them_end(jobs: list[tuple[int, int, int, int]]) -> None:
    """jobs: (comes at, least, tp, lasts). Time passes in ticks; whoever starts holds its grant until it ends."""
    waiting = {}
    for number, (at, least, tp, lasts) in enumerate(jobs):
        claim = waits(f"j{number}", least, submitted_at=float(at), need=Need(least=least, tp=tp), limit=least + 1)
        waiting[claim.job] = (at, claim, lasts)
    feasible = {job for job, (_, claim, _) in waiting.items() if claim.need.num_devices <= claim.limit}
    running: dict[JobId, tuple[int, Claim]] = {}
    for now in range(9 + sum(lasts for *_, lasts in jobs) + len(jobs)):
        running = {job: (until, claim) for job, (until, claim) in running.items() if until > now}
        here = [claim for at, claim, _ in waiting.values() if at <= now]
        answer = arbitrate(Snapshot(devices=DEVICES, claims=(*here, *(claim for _, claim in running.values()))))
        for claim in here:
            one = answer.allotments[claim.job]
            if one.grant:
                lasts = waiting.pop(claim.job)[2]
                running[claim.job] = (now + lasts, replace(claim, holds=one.grant, core=one.grant, wants=False))
    assert not feasible & set(waiting), "nobody starves, however the others come"


# --- single cases --------------------------------------------------------------------------------------------------------


def a_cluster(*sizes: int) -> dict[Device, str]:
    return {Device(NodeId(f"n{n}"), i): "A100" for n, size in enumerate(sizes) for i in range(size)}


def waits(name: str, least: int = 1, priority: int = 0, **more: object) -> Claim:
    return replace(
        Claim(job=JobId(name), priority=priority, need=Need(least=least), limit=least, wants=True, grows=True),
        **more,  # type: ignore[arg-type]
    )


def runs(name: str, on: set[Device], least: int = 1, priority: int = 0, **more: object) -> Claim:
    claim = waits(name, least, priority, limit=0, wants=False, gives=True, holds=frozenset(on), core=frozenset(on))
    return replace(claim, **more)  # type: ignore[arg-type]


def answer(devices: dict[Device, str], *claims: Claim, **quotas: int) -> Arbitration:
    return arbitrate(Snapshot(devices=devices, claims=claims, quotas=quotas))


def test_others_become_smaller_before_anybody_is_put_aside() -> None:
    devices = a_cluster(4, 2)
    low, lower = set(sorted(devices)[:4]), set(sorted(devices)[4:])
    found = answer(devices, runs("low", low, 2, 1), runs("lower", lower, 1, 0), waits("high", 3, 5))
    assert [found.allotments[JobId(j)].is_put_aside for j in ("low", "lower")] == [False, False]
    assert [len(found.allotments[JobId(j)].yields) for j in ("low", "lower")] == [2, 1]
    assert len(found.allotments[JobId("high")].minimum) == 3


def test_where_that_is_too_little_the_lowest_and_youngest_is_put_aside_alone() -> None:
    devices = a_cluster(2, 2, 2)
    parts = [set(sorted(devices)[i : i + 2]) for i in (0, 2, 4)]
    claims = [runs(f"j{i}", part, 2, (1, 0, 0)[i], submitted_at=float(i)) for i, part in enumerate(parts)]
    found = answer(devices, *claims, waits("high", 2, 5))
    assert [found.allotments[claim.job].is_put_aside for claim in claims] == [False, False, True]


def test_the_same_priority_is_never_preempted_and_says_who_holds_what() -> None:
    devices = a_cluster(6)
    found = answer(devices, runs("job-x", set(sorted(devices)[:4]), 1, 5), waits("late", 4, 5))
    wait = found.allotments[JobId("late")].wait
    assert wait is not None and wait.reason is WaitReason.BUSY
    assert wait.message == "waits for 2 more A100: 4 of 6 are held by job-x (priority 5)"


def test_what_can_never_fit_is_told_from_what_is_busy_and_keeps_nothing_from_others() -> None:
    devices = a_cluster(4)
    found = answer(devices, waits("huge", 9, 5), waits("odd", 4, 5, need=Need(least=4, tp=3)), waits("small", 4))
    huge, odd = found.allotments[JobId("huge")].wait, found.allotments[JobId("odd")].wait
    assert huge is not None and odd is not None and huge.reason is odd.reason is WaitReason.INFEASIBLE
    assert "needs 9 devices, 4 are there" in huge.message and "in groups of 3 on one node" in odd.message
    assert len(found.allotments[JobId("small")].grant) == 4


def test_a_smaller_job_passes_the_first_one_only_where_that_could_not_start() -> None:
    devices = a_cluster(4, 4)
    busy = {Device(NodeId("n0"), 0), Device(NodeId("n0"), 1), Device(NodeId("n1"), 0), Device(NodeId("n1"), 1)}
    first = waits("first", 4, submitted_at=1.0, need=Need(least=4, tp=4))
    found = answer(devices, runs("old", busy), first, *(waits(f"small{i}", 1, submitted_at=2.0 + i) for i in range(4)))
    started = [job for job in found.order if job.startswith("small") and found.allotments[job].grant]
    assert len(started) == 2 and len({d.node for job in started for d in found.allotments[job].grant}) == 1
    late = found.allotments[JobId("small3")].wait
    assert late is not None and late.reason is WaitReason.BEHIND and "kept for first" in late.message


def test_a_quota_holds_a_job_back_and_nobody_else() -> None:
    devices = a_cluster(6)
    running = runs("old", set(sorted(devices)[:2]), project="a", gives=False, grows=False)
    found = answer(devices, running, waits("mine", 2, 5, project="a"), waits("other", 4), a=3)
    wait = found.allotments[JobId("mine")].wait
    assert wait is not None and wait.reason is WaitReason.QUOTA and "project a has 2 of the 3" in wait.message
    assert len(found.allotments[JobId("other")].grant) == 4


def test_a_growing_job_leaves_what_a_waiting_one_needs() -> None:
    devices = a_cluster(4)
    for first, second in permutations((runs("old", {Device(NodeId("n0"), 0)}, gives=False), waits("new", 2))):
        found = answer(devices, first, second)
        assert len(found.allotments[JobId("new")].grant) == 2 and len(found.allotments[JobId("old")].grant) == 2


def test_a_broken_job_that_lacks_nothing_any_more_stands_aside_for_nobody() -> None:
    devices = a_cluster(2, 2, 2, 2)
    n0, n1, n2, n3 = ({device for device in devices if device.node == f"n{node}"} for node in range(4))
    broken = [
        replace(waits("first", 6), holds=frozenset(n0), is_stuck=True),
        replace(waits("second", 4), holds=frozenset(n1 | n2), is_stuck=True, submitted_at=9.0),
    ]
    found = answer(devices, *broken, runs("third", n3, 2))
    assert not found.allotments[JobId("second")].is_put_aside and not found.allotments[JobId("second")].yields


def test_one_that_more_than_the_whole_cluster_is_too_small_for_takes_nothing_from_another_that_is_broken() -> None:
    """Its planner has been asked about four devices and found no plan; more are not there."""
    devices = a_cluster(2, 2)
    n0, n1 = ({device for device in devices if device.node == f"n{node}"} for node in range(2))
    first = replace(waits("first", 1), holds=frozenset(n0), is_stuck=True, floor=5)
    second = replace(waits("second", 4), holds=frozenset(n1), is_stuck=True, submitted_at=9.0)
    found = answer(devices, first, second)
    assert found.allotments[JobId("first")].is_put_aside and not found.allotments[JobId("second")].is_put_aside
