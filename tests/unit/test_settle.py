"""What a broken generation had committed: the table of design section 3, case by case."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from orchestrator.domain.generation import Answer, Arrived, Disagrees, RankReport
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.profile import Interval
from orchestrator.recovery.settle import settle
from tests.builders import a_device, a_report, an_answer

A, B, C = a_device(0), a_device(1), a_device(2)
G = Generation(2)
PIECE = Interval("wte", 0, 64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Generation 2 ends; step 4 is recorded, step 5 may be in flight."""

    name: str
    reports: tuple[RankReport, ...]
    committed: int = 4
    last: Answer | None = None
    step: int
    answer: int | None
    holders: tuple[tuple[Device, int], ...]
    arrived: tuple[tuple[Device, tuple[Interval, ...]], ...] = ()
    is_distrusted: bool = False


def report(
    device: Device,
    *,
    voted: int = 0,
    passed: int = 0,
    held: int | None = 0,
    held_in: int | None = None,
    lost_peer: int | None = None,
    passed_in: int | None = None,
) -> RankReport:
    return a_report(
        device,
        generation=2,
        voted=voted,
        passed=passed,
        held=held,
        held_in=held_in,
        lost_peer=lost_peer,
        passed_in=passed_in,
    )


CASES = (
    Case(
        name="killed before or in the reduction: nobody voted, so step 5 is run again",
        reports=(report(A, voted=4, passed=4, held=4), report(B, voted=4, passed=4, held=4), report(C, voted=4, held=None)),
        step=4,
        answer=4,
        holders=((A, 2), (B, 2)),
    ),
    Case(
        name="some voted and nobody passed: step 5 is run again, from the step they still hold",
        reports=(report(A, voted=5, passed=4, held=4), report(B, voted=4, passed=4, held=4)),
        step=4,
        answer=4,
        holders=((A, 2), (B, 2)),
    ),
    Case(
        name="killed in the vote: survivors split, step 5 is committed and the answer is carried to the others",
        reports=(report(A, voted=5, passed=5, held=5), report(B, voted=5, passed=4, held=4)),
        step=5,
        answer=5,
        holders=((A, 2), (B, 2)),
    ),
    Case(
        name="only the victim passed and its host lives: its progress page commits step 5",
        reports=(
            report(A, voted=5, passed=4, held=4),
            report(B, voted=5, passed=4, held=4),
            report(C, passed=5, held=None),
        ),
        step=5,
        answer=5,
        holders=((A, 2), (B, 2)),
    ),
    Case(
        name="only the victim passed and its host is gone: nobody knows, step 5 is run again",
        reports=(report(A, voted=5, passed=4, held=4), report(B, voted=5, passed=4, held=4)),
        step=4,
        answer=4,
        holders=((A, 2), (B, 2)),
    ),
    Case(
        name="killed in the update: who is torn holds nothing",
        reports=(report(A, voted=5, passed=5, held=None), report(B, voted=5, passed=5, held=5)),
        step=5,
        answer=5,
        holders=((B, 2),),
    ),
    Case(
        name="killed while gathering: everybody has updated",
        reports=(report(A, voted=5, passed=5, held=5), report(B, voted=5, passed=5, held=5)),
        step=5,
        answer=5,
        holders=((A, 2), (B, 2)),
    ),
    Case(
        name="a step that a supervisor has recorded is never taken back, whoever is left",
        reports=(report(B, voted=5, passed=4, held=4),),
        committed=5,
        last=an_answer(5),
        step=5,
        answer=5,
        holders=((B, 2),),
    ),
    Case(
        name="who did not vote for the committed step lacks its gradient and cannot reach it",
        reports=(report(A, voted=5, passed=5, held=5), report(B, voted=4, passed=4, held=4)),
        step=5,
        answer=5,
        holders=((A, 2),),
    ),
    Case(
        name="a recorded step whose answer is lost is reached only by those who have applied it",
        reports=(report(A, voted=5, held=5), report(B, voted=5, held=4)),
        committed=5,
        step=5,
        answer=None,
        holders=((A, 2),),
    ),
    Case(
        name="closed before anybody restored: earlier generations' memory counts, under their own plan",
        reports=(
            report(A, voted=4, passed=4, held=4, held_in=1),
            report(B, voted=4, held=3, held_in=1),
            report(C, held=None),
        ),
        last=an_answer(4),
        step=4,
        answer=4,
        holders=((A, 1), (B, 1)),
    ),
    Case(
        name="a vote of an earlier generation that was rolled back since does not come true again",
        reports=(report(A, voted=9, passed=9, held=9, held_in=1), report(B, voted=4, held=4)),
        step=4,
        answer=None,
        holders=((B, 2),),
    ),
    Case(
        name="what a generation that never restored had told does not come true again once it was rolled back",
        reports=(report(A, passed=9, held=None, passed_in=0), report(B, voted=4, held=4)),
        step=4,
        answer=None,
        holders=((B, 2),),
    ),
    Case(
        name="a host of an earlier version does not say whose vote it was: what is held beside it tells",
        reports=(
            replace(report(A, voted=9, passed=9, held=9, held_in=1), answered_in=None),
            replace(report(B, voted=5, passed=5, held=5), answered_in=None),
        ),
        step=5,
        answer=5,
        holders=((B, 2),),
    ),
    Case(
        name="an owner and its mirror disagree: what they have spoiled since is unknown, so nobody holds anything",
        reports=(
            report(A, voted=5, passed=5, held=5),
            replace(report(B, voted=5, passed=5, held=5), found=Disagrees(rank=Rank(0), about="state")),
            replace(report(C, voted=5, passed=5, held=5), arrived=Arrived(step=Step(5), intervals=(PIECE,))),
        ),
        step=5,
        answer=5,
        holders=(),
        is_distrusted=True,
    ),
    Case(
        name="memory that changed by itself, or a gradient computed twice that differs, speaks of nobody else's memory",
        reports=(
            replace(report(A, voted=4, passed=4, held=None), found=Disagrees(rank=Rank(0), about="memory")),
            replace(report(B, voted=4, passed=4, held=4), found=Disagrees(rank=Rank(0), about="gradient")),
        ),
        step=4,
        answer=4,
        holders=((B, 2),),
    ),
    Case(
        name="what a transfer that was cut short had brought counts where it is of the settled step",
        reports=(
            report(A, voted=5, passed=5, held=5),
            replace(report(B, voted=5, held=None), arrived=Arrived(step=Step(5), intervals=(PIECE,))),
            replace(report(C, voted=5, held=None), arrived=Arrived(step=Step(4), intervals=(PIECE,))),
        ),
        step=5,
        answer=5,
        holders=((A, 2),),
        arrived=((B, (PIECE,)),),
    ),
    Case(name="nobody is left", reports=(), last=an_answer(4), step=4, answer=4, holders=()),
    Case(
        name="broken before the first step",
        reports=(report(A, held=0), report(B, held=None)),
        committed=0,
        step=0,
        answer=None,
        holders=((A, 2),),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_settlement_table(case: Case) -> None:
    found = settle(G, Step(case.committed), case.last, {report.device: report for report in case.reports})
    assert found.generation == G
    assert found.step == case.step
    assert found.answer == (an_answer(case.answer) if case.answer is not None else None)
    assert found.holders == case.holders
    assert found.arrived == case.arrived
    assert found.is_distrusted is case.is_distrusted


def test_settlement_does_not_depend_on_the_order_of_reports() -> None:
    reports = [report(A, voted=5, passed=5, held=5), report(B, voted=5, passed=4, held=4), report(C, voted=5, held=None)]
    forwards = settle(G, Step(4), an_answer(4), {r.device: r for r in reports})
    backwards = settle(G, Step(4), an_answer(4), {r.device: r for r in reversed(reports)})
    assert forwards == backwards
