"""The simulator's pause of a killed rank is the real one's, where its constants come from what was measured."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.calibration import compared, killed
from orchestrator.domain.rungs import Rung

pytestmark = pytest.mark.timeout(240)

KILLS = 7


def test_the_simulated_pause_of_a_killed_rank_is_within_30_percent_of_the_real_one(tmp_path: Path) -> None:
    kills = asyncio.run(killed(tmp_path, KILLS))
    found = compared(kills)
    assert found.rung is Rung.FORK and {one.incident.rung for one in kills if one.is_whole} == {Rung.FORK}
    assert 0.7 <= found.ratio <= 1.3, found
