"""Describing programs in a process of their own, whatever they do there."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.adapters.plan_thread import ThreadPlanner
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.errors import Refused
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import DataSpec, JobSpec
from orchestrator.ports import Probed
from tests.saved import save, state_of
from tests.tiny_model import a_spec
from worker.data import sources
from worker.programs.causal_lm import PROGRAM

pytestmark = pytest.mark.timeout(120)


def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, timeout_s: float = 100) -> None:
    spec = spec_in(tmp_path)
    if program is not None:
        (tmp_path / "theirs.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        tmp_path.chmod(0o755)  # programs are imported by a user of their own
        spec = replace(spec, program="theirs:PROGRAM")
    described = replace(PROGRAM.describe(spec), text_sha256=sources.digest(sources.load(spec.data)))
    found = asyncio.run(SubprocessProber(timeout_s).probe(spec))
    assert len(found.profile.program_sha256) == 64
    assert replace(found, profile=replace(found.profile, program_sha256="")) == Probed(profile=described)


def spec_in(tmp_path: Path) -> JobSpec:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return replace(a_spec(), data=DataSpec(files=(str(tmp_path / "*.txt"),)))


def test_program_that_works_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed(tmp_path, monkeypatch, None)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ValueError('not today')", "not today"),
        ("print('{\"profile\": {}}', flush=True)\nimport os\nos._exit(3)", "exit code 3"),
        ("import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)", "last words"),
    ],
    ids=["raises", "exits", "is killed"],
)
def test_program_that_fails_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    with pytest.raises(Refused, match=said):
        probed(tmp_path, monkeypatch, program)


def test_program_that_hangs_is_refused_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(Refused, match="within 1 s"):
        probed(tmp_path, monkeypatch, "import time\ntime.sleep(100)", timeout_s=1)
    assert time.monotonic() - began < 30


def test_problems_of_settings_name_their_fields(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    with pytest.raises(Refused) as refused:
        asyncio.run(SubprocessProber().probe(replace(spec, parallel=replace(spec.parallel, tp=3))))
    assert [problem.field for problem in refused.value.problems] and "parallel.tp" in refused.value.message


def test_a_checkpoint_to_begin_with_is_found_and_has_to_fit(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    found = save(tmp_path / "checkpoints", spec, state_of(spec), step=3)
    asked = replace(spec, checkpoint=replace(spec.checkpoint, restore_from=str(tmp_path)))
    assert asyncio.run(SubprocessProber().probe(asked)).start == found.reference
    with pytest.raises(Refused, match=r"layers.1.gate is 48 x 32 there and 64 x 32 here") as refused:
        asyncio.run(SubprocessProber().probe(replace(asked, model={**spec.model, "ffn": 64})))
    assert [problem.field for problem in refused.value.problems] == ["checkpoint.restore_from"]


def test_planner_answers_off_the_loop(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    devices = tuple((Device(NodeId(f"n{index // 2}"), index % 2), "A100") for index in range(2))
    request = ChoosePlan(
        job=JobId("j"), generation=Generation(1), spec=spec, profile=PROGRAM.describe(spec), devices=devices
    )
    began = time.perf_counter()
    plan = asyncio.run(ThreadPlanner().choose(request))
    print(f"\nplanned in {(time.perf_counter() - began) * 1000:.1f} ms")
    assert isinstance(plan, Plan) and plan.world_size == 2
