"""A quarter of the two thousand seeds that every change of the kernel has to pass."""

from __future__ import annotations

import pytest

from tests.sim.many import check, chunks


@pytest.mark.long
@pytest.mark.parametrize("seeds", chunks(1000, 1500), ids=str)
def test_seeds(seeds: range) -> None:
    check(seeds)
