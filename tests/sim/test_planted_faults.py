"""Faults planted in decision code, each caught by a checker within a few seeds: the checkers are no decoration."""

from __future__ import annotations

import pytest

from orchestrator.sim.run import run
from tests.sim.planted import ALL, Planted, caught


@pytest.mark.parametrize("planted", ALL, ids=lambda one: one.plant.__name__)
def test_a_planted_fault_is_caught(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    found = caught(planted, monkeypatch, run)
    assert found is not None, f"no seed of {planted.seeds} shows it"
    seed, outcome = found
    assert outcome.verdict is planted.verdict, f"seed {seed}: {outcome.message}"
    assert planted.words in outcome.message


def test_enough_of_them_are_planted() -> None:
    assert len(ALL) >= 10
