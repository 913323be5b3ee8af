"""What is saved of which step: the same for every rank, because it follows from what all of them know."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.checkpoint import FIRST_EVERY, LONGEST_JOURNAL, Pacing
from orchestrator.domain.course import Course
from orchestrator.domain.ids import Step
from orchestrator.domain.spec import CheckpointSpec

JOURNAL = Pacing(every=8, is_journal=True)


def saved(
    pacing: Pacing, first: int, last: int, *, asked: Collection[int] = (), full: Collection[int] = (), steps: int = 1000
) -> dict[int, str]:
    """Of the steps first..last of a generation: b for a base, e for an entry, - for what there was no room for."""
    course, found = Course(pacing=pacing, last=Step(steps)), {}
    for step in map(Step, range(first, last + 1)):
        kind = course.due(step, step in asked)
        if kind is not None and step in full:
            course, found[int(step)] = course.skipped(), "-"
        elif kind is not None:
            course, found[int(step)] = course.saved(step, kind), "b" if kind == "base" else "e"
    return found


def in_a_row(found: dict[int, str]) -> str:
    return "".join(found.values())


def test_whole_states_come_at_round_steps_and_at_the_end() -> None:
    assert saved(Pacing(every=10), 5, 34, steps=34) == {10: "b", 20: "b", 30: "b", 34: "b"}
    assert saved(Pacing(every=0), 1, 34, steps=34) == {}
    assert saved(Pacing(every=0), 1, 34, steps=34, asked=(7,)) == {7: "b"}, "a person gets one in any case"


def test_a_journal_saves_every_step_and_begins_with_a_base_in_each_generation() -> None:
    assert in_a_row(saved(JOURNAL, 11, 26)) == "beeeebeeeeeeebee"
    assert in_a_row(saved(JOURNAL, 20, 22, steps=22)) == "beb", "the last of a job is whole"


def test_what_is_asked_for_and_what_follows_a_step_that_was_not_saved_is_a_base() -> None:
    assert in_a_row(saved(JOURNAL, 1, 7, asked=(4,))) == "beebeee"
    assert in_a_row(saved(JOURNAL, 1, 8, full=(3, 4))) == "be--beeb"


@given(
    every=st.integers(2, LONGEST_JOURNAL),
    first=st.integers(1, 100),
    asked=st.sets(st.integers(1, 260)),
    full=st.sets(st.integers(1, 260)),
)
def test_an_entry_goes_on_from_the_step_before_it_and_no_chain_is_longer_than_the_limit(
    every: int, first: int, asked: set[int], full: set[int]
) -> None:
    found = saved(Pacing(every=every, is_journal=True), first, 250, asked=asked, full=full, steps=250)
    assert sorted(found) == list(range(first, 251))
    depth = 0
    for step, what in found.items():
        depth = 0 if what != "e" else depth + 1
        assert what != "e" or found[step - 1] in "be"
        assert depth <= LONGEST_JOURNAL


@pytest.mark.parametrize(
    ("spec", "pacing"),
    [
        (CheckpointSpec(policy="full", every=500), Pacing(every=500)),
        (CheckpointSpec(policy="auto", every=500), Pacing(every=500)),
        (CheckpointSpec(policy="auto", every="auto"), Pacing(every=FIRST_EVERY)),
        (CheckpointSpec(policy="journal", every="auto"), Pacing(every=FIRST_EVERY, is_journal=True)),
        (CheckpointSpec(policy="journal", every=32), Pacing(every=32, is_journal=True)),
        (CheckpointSpec(policy="auto", every=0), Pacing(every=0)),
    ],
)
def test_a_job_begins_with_what_its_file_says(spec: CheckpointSpec, pacing: Pacing) -> None:
    assert Pacing.asked_for(spec) == pacing
