"""The hash that copies are compared by: no flipped bit goes unseen, and the same bits give the same hash everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.digest import SLICE, checksum, digest

SIZE = SLICE + 1000
CAPABILITIES = ("default", "avx2", "avx512")


def some(size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """Bits of every kind; made of whole numbers, since torch's random ones depend on the instruction set."""
    return ((torch.arange(size) + seed) * 2654435761 % (1 << 32) - (1 << 31)).to(torch.int32).view(torch.float32)


def flipped(values: torch.Tensor, at: int, bit: int) -> torch.Tensor:
    changed = values.clone()
    words = changed.view(torch.int32)
    words[at] = int(words[at]) ^ ((1 << bit) - (1 << 32 if bit == 31 else 0))
    return changed


@settings(max_examples=60, deadline=None)
@given(st.integers(0, SIZE - 1), st.integers(0, 31), st.integers(0, SIZE - 1), st.integers(0, 31))
def test_any_flipped_bit_changes_it_and_two_do_not_cancel(at: int, bit: int, other: int, its_bit: int) -> None:
    values = some()
    once = flipped(values, at, bit)
    assert not torch.equal(digest(once), digest(values))
    if (other, its_bit) != (at, bit):
        assert not torch.equal(digest(flipped(once, other, its_bit)), digest(values))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 3), st.integers(0, 1 << 20), st.integers(0, 31))
def test_any_flipped_bit_changes_the_checksum_which_does_not_depend_on_where_values_are_kept(
    size: int, shift: int, at: int, bit: int
) -> None:
    values = some(3 * size)
    home = torch.zeros(3, size + shift)
    home[:, shift:] = values.view(3, size)
    assert torch.equal(checksum(home[:, shift:]), checksum(values.view(3, size)))
    changed = flipped(values, at % (3 * size), bit)
    assert not torch.equal(checksum(changed.view(3, size)), checksum(values.view(3, size)))


def test_bits_that_compare_equal_as_numbers_are_told_apart() -> None:
    zero, minus = torch.zeros(10), -torch.zeros(10)
    assert torch.equal(zero, minus) and not torch.equal(digest(zero), digest(minus))
    nan = torch.full((10,), float("nan"))
    assert torch.equal(digest(nan), digest(nan.clone()))
    assert not torch.equal(digest(flipped(nan, 3, 0)), digest(nan))


def test_order_and_length_count() -> None:
    a, b = some(100, 1), some(100, 2)
    assert not torch.equal(digest(a, b), digest(b, a))
    assert not torch.equal(digest(torch.zeros(64)), digest(torch.zeros(128)))
    assert torch.equal(digest(torch.empty(0)), digest(torch.empty(0)))


def test_it_does_not_depend_on_where_the_values_are_kept() -> None:
    values = some()
    for shift in (1, 3, 64):
        home = torch.zeros(shift + SIZE)
        home[shift:] = values
        assert torch.equal(digest(home[shift:]), digest(values))


def test_every_instruction_set_gives_the_same() -> None:
    asks = "from tests.unit.test_digest import some; from worker.digest import digest; print(int(digest(some())))"
    found = set()
    for name in CAPABILITIES:
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": name, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        asked = subprocess.run([sys.executable, "-c", asks], env=environment, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr
        found.add(asked.stdout)
    assert found == {f"{int(digest(some()))}\n"}
