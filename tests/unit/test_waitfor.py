"""Who is to blame for a stall: for any plan, any phase and any culprit, and never somebody who only waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.detection.waitfor import (
    LONELY_S,
    AtWork,
    Circle,
    Culprits,
    Diagnosis,
    LinksLost,
    Moving,
    NodesSilent,
    Standstill,
    diagnose,
    fingerprint,
)
from orchestrator.domain.ids import Device, Generation, NodeId, Rank, Step
from orchestrator.domain.sight import Phase, RankSight, Traffic

G = Generation(4)
PER_NODE = 2


def at(rank: int) -> Device:
    return Device(NodeId(f"n{rank // PER_NODE}"), rank % PER_NODE)


@dataclass
class Stall:
    """size ranks that run one program: a list of collectives, each a tuple of members, one after another.

    Everybody sends to every other member when it enters and leaves once it has received from all. Who is in `stuck` hangs
    before it enters its n-th collective; over a link in `cut` (from, to) nothing arrives. The rest is what follows.
    """

    size: int
    program: list[tuple[int, ...]]
    stuck: dict[int, int] = field(default_factory=dict)
    cut: set[tuple[int, int]] = field(default_factory=set)
    programs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """Of ranks that run another one than all."""

    def __post_init__(self) -> None:
        programs = {rank: self.programs.get(rank, self.program) for rank in range(self.size)}
        mine = {rank: [c for c in program if rank in c and len(c) > 1] for rank, program in programs.items()}
        self.entered = dict.fromkeys(range(self.size), 0)
        self.finished = dict.fromkeys(range(self.size), 0)
        self.sent: dict[tuple[int, int], int] = {}
        self.took: dict[tuple[int, int], int] = {}
        self.mine = mine
        while any([self._advance(rank) for rank in range(self.size)]):
            pass

    def _advance(self, rank: int) -> bool:
        number = self.finished[rank]
        if number == len(self.mine[rank]) or (self.entered[rank] == number and self.stuck.get(rank) == number):
            return False
        peers = [peer for peer in self.mine[rank][number] if peer != rank]
        if self.entered[rank] == number:
            self.entered[rank] += 1
            for peer in peers:
                self.sent[rank, peer] = self.sent.get((rank, peer), 0) + 1
        if any(self._arrived(peer, rank) <= self.took.get((peer, rank), 0) for peer in peers):
            return False
        for peer in peers:
            self.took[peer, rank] = self.took.get((peer, rank), 0) + 1
        self.finished[rank] += 1
        return True

    def _arrived(self, source: int, target: int) -> int:
        return 0 if (source, target) in self.cut else self.sent.get((source, target), 0)

    def is_done(self, rank: int) -> bool:
        return self.finished[rank] == len(self.mine[rank])

    def is_waiting(self, rank: int) -> bool:
        return self.entered[rank] > self.finished[rank]

    def sights(self, still_s: float = 2.0, *, tells: bool = True) -> dict[Device, RankSight]:
        return {at(rank): self._sight(rank, still_s, tells) for rank in range(self.size)}

    def _sight(self, rank: int, still_s: float, tells: bool) -> RankSight:
        waiting, number = self.is_waiting(rank), self.finished[rank]
        members = self.mine[rank][number] if waiting else ()
        traffic = {}
        for peer in range(self.size) if waiting and tells else ():
            arrived = self._arrived(peer, rank)
            traffic[Rank(peer)] = Traffic(
                sent=self.sent.get((rank, peer), 0),
                received=arrived,
                awaits=peer != rank and peer in members and arrived <= self.took.get((peer, rank), 0),
            )
        stuck = rank in self.stuck and not waiting and not self.is_done(rank)
        return RankSight(
            device=at(rank),
            generation=G,
            phase=Phase.IDLE if self.is_done(rank) else Phase.COMPUTE,
            step=Step(57),
            still_s=still_s,
            in_wait=waiting,
            group=f"g[{','.join(map(str, members))}]" if waiting else "",
            members=tuple(Rank(member) for member in members),
            collective=self.entered[rank],
            traffic=traffic,
            is_guilty=stuck,
            why="has slept" if stuck else "",
        )

    def judged(self, silent: tuple[NodeId, ...] = (), *, tells: bool = True) -> Diagnosis:
        sights = {device: sight for device, sight in self.sights(tells=tells).items() if device.node not in silent}
        return judged(self.size, sights, silent)


def judged(size: int, sights: Mapping[Device, RankSight], silent: tuple[NodeId, ...] = ()) -> Diagnosis:
    return diagnose({Rank(rank): at(rank) for rank in range(size)}, G, sights, silent)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[tuple[int, ...]]]:
    """A step of a random tp x pp x dp: tensor groups, then pipelines, then data groups, then everybody's vote by axes."""
    tp, pp, dp = (draw(st.integers(1, 3)) for _ in range(3))
    number = {(p, s, t): (p * pp + s) * tp + t for p in range(dp) for s in range(pp) for t in range(tp)}
    tps = [tuple(number[p, s, t] for t in range(tp)) for p in range(dp) for s in range(pp)]
    pps = [(number[p, s, t], number[p, s + 1, t]) for p in range(dp) for t in range(tp) for s in range(pp - 1)]
    dps = [tuple(number[p, s, t] for p in range(dp)) for s in range(pp) for t in range(tp)]
    return tp * pp * dp, [*tps, *pps, *tps, *pps, *dps, *tps, *pps, *dps]


@settings(max_examples=150, deadline=None)
@given(steps(), st.data(), st.booleans())
def test_whoever_hangs_wherever_is_named_and_nobody_else(
    step: tuple[int, list[tuple[int, ...]]], data: st.DataObject, tells: bool
) -> None:
    size, program = step
    culprit = data.draw(st.integers(0, size - 1))
    own = sum(culprit in members and len(members) > 1 for members in program)
    if not own:
        return
    stall = Stall(size, program, stuck={culprit: data.draw(st.integers(0, own - 1))})
    waiters = sum(map(stall.is_waiting, range(size)))
    found = stall.judged(tells=tells)
    assert isinstance(found, Culprits) and found.devices == (at(culprit),)
    assert f"rank {culprit} on {at(culprit)} (in COMPUTE of step 57) has slept; {waiters} rank" in found.message


@settings(max_examples=100, deadline=None)
@given(steps(), st.data())
def test_a_link_that_swallows_messages_is_told_from_a_hang_and_names_both_ends(
    step: tuple[int, list[tuple[int, ...]]], data: st.DataObject
) -> None:
    size, program = step
    pairs = sorted({(a, b) for members in program for a in members for b in members if a != b})
    if not pairs:
        return
    lost = data.draw(st.sampled_from(pairs))
    found = Stall(size, program, cut={lost}).judged()
    assert isinstance(found, LinksLost) and found.pairs == ((min(map(at, lost)), max(map(at, lost))),)


@settings(max_examples=100, deadline=None)
@given(steps(), st.data())
def test_a_node_that_nobody_reaches_is_given_up_where_everybody_waits_for_it(
    step: tuple[int, list[tuple[int, ...]]], data: st.DataObject
) -> None:
    size, program = step
    dead = data.draw(st.integers(0, (size - 1) // PER_NODE))
    on_it = [rank for rank in range(size) if rank // PER_NODE == dead]
    stall = Stall(size, program, stuck=dict.fromkeys(on_it, 0))
    found = stall.judged((NodeId(f"n{dead}"),))
    if any(stall.is_waiting(rank) for rank in range(size) if rank not in on_it):
        assert isinstance(found, NodesSilent) and found.nodes == (NodeId(f"n{dead}"),)
    else:
        assert isinstance(found, Moving)


MISMATCH = Stall(4, [], programs={rank: [(rank, (rank + 1) % 4), ((rank - 1) % 4, rank)] for rank in range(4)})


def test_ranks_that_call_different_collectives_wait_in_a_circle_and_nobody_is_blamed() -> None:
    found = MISMATCH.judged()
    assert isinstance(found, Circle) and set(found.devices) == {at(rank) for rank in range(4)}
    assert "rank 0 on n0/0 waits in g[0,1] for rank 1 on n0/1" in found.message and "same order" in found.message


def test_where_waits_do_not_tell_whom_they_are_for_a_standstill_is_no_verdict_on_the_program() -> None:
    sights = {d: replace(s, traffic={}, group="x", members=()) for d, s in MISMATCH.sights().items()}
    assert isinstance(judged(4, sights), Standstill)


def test_where_waits_name_a_group_alone_two_that_wait_in_different_ones_are_no_circle() -> None:
    """On gloo each is waited for by the other, as far as groups tell; a message may be what is missing."""
    assert isinstance(MISMATCH.judged(tells=False), Standstill)


def test_a_rank_that_takes_long_is_at_work_until_its_own_host_says_otherwise() -> None:
    stall = Stall(8, [tuple(range(8))], stuck={3: 0})
    sights = stall.sights()
    slow = replace(sights[at(3)], is_guilty=False, why="")
    assert isinstance(judged(8, {**sights, at(3): slow}), AtWork)
    assert isinstance(judged(8, {**sights, at(3): replace(slow, still_s=0.1)}), Moving)


def test_an_alarm_about_ranks_that_have_moved_on_is_false() -> None:
    stall = Stall(8, [tuple(range(8))], stuck={3: 0})
    sights = {device: replace(sight, still_s=0.05, is_guilty=False) for device, sight in stall.sights().items()}
    assert isinstance(judged(8, sights), Moving)


def test_a_stopped_rank_is_the_culprit_even_in_the_middle_of_a_wait() -> None:
    sights = Stall(8, [tuple(range(8))], stuck={3: 0}).sights()
    sights[at(3)] = replace(sights[at(3)], is_guilty=False)
    sights[at(5)] = replace(sights[at(5)], is_guilty=True, is_stopped=True, why="has been stopped (SIGSTOP) for 0.5 s")
    found = judged(8, sights)
    assert isinstance(found, Culprits) and found.devices == (at(5),) and not found.where


def test_ranks_that_all_sleep_with_nobody_waiting_are_given_time() -> None:
    """They may all be fetching something from the same slow place; to kill them all would lose what they hold."""
    stall = Stall(4, [tuple(range(4))], stuck=dict.fromkeys(range(4), 0))
    assert isinstance(judged(4, stall.sights()), AtWork)
    found = judged(4, stall.sights(LONELY_S))
    assert isinstance(found, Culprits) and len(found.devices) == 4


def test_a_host_that_has_yet_to_answer_is_waited_for_not_blamed() -> None:
    stall = Stall(4, [tuple(range(4))], stuck={3: 0})
    sights = {device: sight for device, sight in stall.sights().items() if device.node == "n0"}
    assert isinstance(judged(4, sights), AtWork)
    assert isinstance(judged(4, sights, (NodeId("n1"),)), NodesSilent)


def test_ranks_that_look_for_each_other_and_do_not_find_each_other_have_lost_their_link() -> None:
    forming = replace(Stall(4, [tuple(range(4))], stuck={3: 0}).sights()[at(0)], phase=Phase.FORM, group="form", members=())
    misses = {0: {1: Traffic(awaits=True)}, 1: {0: Traffic(awaits=True)}, 2: {0: Traffic(awaits=True)}, 3: {}}
    sights = {
        at(rank): replace(forming, device=at(rank), traffic={Rank(p): t for p, t in missing.items()})
        for rank, missing in misses.items()
        if rank < 2
    }
    found = judged(2, sights)
    assert isinstance(found, LinksLost) and found.pairs == ((at(0), at(1)),)


def test_what_a_peer_does_not_take_is_lost_where_it_waits_and_its_own_doing_where_it_does_not() -> None:
    sights = Stall(2, [(0, 1)], cut={(0, 1)}).sights()
    sends = replace(sights[at(0)], traffic={Rank(1): Traffic(sent=3, unsent=True)})
    waits = replace(sights[at(1)], in_wait=True, traffic={Rank(0): Traffic(sent=0, received=3, awaits=True)})
    assert isinstance(judged(2, {at(0): sends, at(1): waits}), LinksLost)
    # Whoever does not take it may be waiting for somebody else, and in the end for who cannot get it through.
    ring = {
        0: {1: Traffic(sent=3, received=2, unsent=True), 2: Traffic(sent=1, received=2)},
        1: {0: Traffic(sent=2, received=2), 2: Traffic(sent=1, received=1, awaits=True)},
        2: {0: Traffic(sent=2, received=1, awaits=True), 1: Traffic(sent=1, received=1)},
    }
    lost = {
        at(rank): replace(sends, device=at(rank), traffic={Rank(p): t for p, t in traffic.items()})
        for rank, traffic in ring.items()
    }
    found = judged(3, lost)
    assert isinstance(found, LinksLost) and found.pairs == ((at(0), at(1)),)
    hangs = replace(waits, in_wait=False, traffic={}, is_guilty=True, why="has slept")
    assert isinstance(judged(2, {at(0): sends, at(1): hangs}), Culprits)


@pytest.mark.parametrize("change", [{"collective": 9}, {"step": Step(58)}, {"phase": Phase.VOTE}])
def test_a_fingerprint_tells_who_has_moved(change: dict[str, object]) -> None:
    sights = Stall(4, [tuple(range(4))], stuck={3: 0}).sights()
    moved = {**sights, at(1): replace(sights[at(1)], **change)}  # type: ignore[arg-type]
    assert fingerprint(sights) != fingerprint(moved)
    assert fingerprint(sights) == fingerprint({d: replace(s, still_s=99.0) for d, s in sights.items()})
