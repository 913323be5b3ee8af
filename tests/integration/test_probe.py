"""A program is described in a process of its own: it may print, raise or exit, and the answer is still one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.domain import codec
from orchestrator.domain.errors import Refused
from orchestrator.domain.spec import DataSpec, JobSpec, ParallelSpec, TrainSpec
from worker.probe import describe

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "text.txt").write_text("all work and no play\n" * 200)
    return JobSpec(
        name="t",
        program="causal_lm",
        data=DataSpec(files=(str(tmp_path / "text.txt"),)),
        train=TrainSpec(steps=10, micro_batches=4, micro_batch_size=1, sequence=16),
        model={"layers": 2, "width": 32, "heads": 2, "ffn": 64},
    )


def probe(spec: JobSpec, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "worker.probe"],
        input=codec.dumps(spec),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{Path.cwd()}"},
    )
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def refusal(spec: JobSpec) -> Refused:
    with pytest.raises(Refused) as refused:
        describe(spec)
    return refused.value


def test_what_cannot_work_is_refused_naming_the_field(spec: JobSpec) -> None:
    odd = refusal(replace(spec, parallel=ParallelSpec(tp=3, pp=9, dp=2)))
    assert {problem.field for problem in odd.problems} == {"parallel.tp", "parallel.pp"}
    assert "parallel.tp is 3 and does not divide model.heads 2" in odd.message
    assert "pp 9 x dp 2 needs 18 micro-batches" in odd.message

    exact = replace(spec, train=replace(spec.train, exact=True), parallel=ParallelSpec(tp=2))
    cut = refusal(replace(exact, model={**spec.model, "width": 36, "ffn": 66}))
    assert "train.exact is True, but parallel.tp 2 cuts layers.1.q inside a block: 1296 elements" in cut.message

    assert "matches no file" in refusal(replace(spec, data=DataSpec(files=("/nowhere/*.txt",)))).message


def test_a_noisy_or_broken_program_cannot_spoil_the_answer(spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "a_program.py").write_text(
        textwrap.dedent(
            """
            import os, sys
            from worker.programs.causal_lm import CausalLM
            print("hello from the program")
            os.system("echo and from its child")

            class Broken(CausalLM):
                def describe(self, spec):
                    raise KeyError("no such layer")

            class Leaving(CausalLM):
                def describe(self, spec):
                    sys.exit(0)

            NOISY, BROKEN, LEAVING = CausalLM(), Broken(), Leaving()
            """
        )
    )
    assert "profile" in probe(replace(spec, program="a_program:NOISY"), tmp_path)
    broken = probe(replace(spec, program="a_program:BROKEN"), tmp_path)["refused"]
    assert broken == {"message": "the program failed while it was described: KeyError: 'no such layer'", "problems": []}
    assert "SystemExit: 0" in probe(replace(spec, program="a_program:LEAVING"), tmp_path)["refused"]["message"]


def test_a_program_that_crashes_leaves_no_core_with_its_secrets(spec: JobSpec, tmp_path: Path) -> None:
    said = "import resource\nraise RuntimeError(f'cores {resource.getrlimit(resource.RLIMIT_CORE)}')\n"
    (tmp_path / "tells_of_cores.py").write_text(said)
    assert "cores (0, 0)" in probe(replace(spec, program="tells_of_cores:program"), tmp_path)["refused"]["message"]
