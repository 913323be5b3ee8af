"""The page of public incidents names tests that exist, for every row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "decisions" / "incidents.md").read_text("utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_row_is_there_once() -> None:
    assert re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == [str(number) for number in range(1, 28)]
    assert re.findall(r"^\| (A\d+) \|", PAGE, re.MULTILINE) == [f"A{number}" for number in range(1, 26)]
    goals = [*(f"S{number}" for number in range(1, 16)), "F9", "F17", "F18", "F19"]
    assert re.findall(r"^\| ([SF]\d+) \|", PAGE, re.MULTILINE) == goals


@pytest.mark.parametrize("row", re.findall(r"^\| [^|\n]+ \|.*$", PAGE, re.MULTILINE)[1:], ids=lambda row: row[2:30])
def test_a_row_names_a_test_or_says_why_not(row: str) -> None:
    if row.startswith(("| killed", "| report", "| goal")):
        return
    named = NAMED.findall(row)
    assert named or "later:" in row or "not:" in row, row
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert re.search(rf"\n(?:async )?def {name}\(", (ROOT / path).read_text("utf-8")), f"{path} has no {name}"
