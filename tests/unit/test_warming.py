"""What a rank's first step would import is imported where ranks are forked from, or never."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import sys
from dataclasses import replace

import worker.zygote
from tests.jobs import a_job
from worker.program import load_program
from worker.reference import run
from worker.warming import warm

spec = a_job(steps=2)
spec = replace(spec, train=replace(spec.train, **{changes}))
program = load_program(spec.program)
warm(spec, program.describe(spec), program)
before = set(sys.modules)
run(spec)
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("changes", [{"exact": True}, {"exact": False, "dtype": "bf16"}], ids=["exact", "bf16"])
def test_a_warmed_process_imports_nothing_in_its_first_steps(changes: dict[str, object]) -> None:
    """Exact mode once imported a compiler there: every new rank lost two seconds."""
    code = CHECK.replace("{changes}", repr(changes))
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert ran.stdout.split() == []
