"""A checkpoint in Hugging Face's layout: `transformers` itself loads it and computes what our program computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from orchestrator.adapters.manifest import CheckpointCorrupt
from orchestrator.domain.errors import Conflict, Refused
from orchestrator.domain.spec import JobSpec
from tests.saved import save, state_of
from tests.tiny_model import a_spec, number, tokens_of
from worker.checkpoint.export import export
from worker.parallel.group import ALONE
from worker.programs.causal_lm import PROGRAM

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def ours(spec: JobSpec, state: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of our program with these weights, fp32, outside training."""
    spec = replace(spec, train=replace(spec.train, dtype="fp32"))
    profile = PROGRAM.describe(spec)
    leaves = {
        (line.name, layer): torch.nn.Parameter(state[line.name][0].view(line.shape))
        for line in profile.lines
        for layer in line.layers
    }
    model = PROGRAM.build(spec, 0, profile.num_layers, ALONE, leaves).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, number(0), number(1))
    return logits


def theirs(folder: Path, tokens: torch.Tensor) -> tuple[Any, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model, model(tokens).logits


@pytest.mark.parametrize(
    "model",
    [{}, {"tied": True, "dropout": 0.2}, {"kv_heads": None, "heads": 4, "rope_theta": 500_000.0, "vocabulary": 320}],
    ids=["grouped", "tied", "one group a head"],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, model: dict[str, object]) -> None:
    spec = a_spec(**model)
    state = state_of(spec)
    tokens = tokens_of(spec, 0)[0]
    seen: list[tuple[int, int]] = []
    made = export(
        save(tmp_path / "saved", spec, state),
        spec,
        tmp_path / "out",
        file_bytes=20_000,
        progress=lambda *at: seen.append(at),
    )
    assert made.num_files > 1 and (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert seen[0] == (0, made.num_bytes) and seen[-1] == (made.num_bytes, made.num_bytes)
    loaded, logits = theirs(tmp_path / "out", tokens)
    expected = ours(spec, state, tokens)
    assert expected.std() > 0.05, "not worth comparing"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert type(loaded).__name__ == "LlamaForCausalLM" and loaded.dtype == torch.float32
    assert loaded.num_parameters() == PROGRAM.describe(spec).num_params


def test_bf16_weights_are_rounded_once_and_stay_bf16(tmp_path: Path) -> None:
    spec = a_spec()
    state = state_of(spec)
    tokens = tokens_of(spec, 0)[0]
    made = export(save(tmp_path / "saved", spec, state), spec, tmp_path / "out", dtype="bf16")
    assert made.num_files == 1 and (tmp_path / "out" / "model.safetensors").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {values.dtype for values in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    loaded, _ = theirs(tmp_path / "out", tokens)
    assert loaded.dtype == torch.bfloat16
    rounded = {name: rows.to(torch.bfloat16).float() for name, rows in state.items()}
    with torch.no_grad():
        logits = loaded.float()(tokens).logits
    torch.testing.assert_close(logits, ours(spec, rounded, tokens), rtol=0, atol=1e-4)


def test_its_tokens_are_bytes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = a_spec()
    export(save(tmp_path / "saved", spec, state_of(spec)), spec, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("plain words", " é \n\t\x00 漢字 "):
        ids = tokenizer.encode(text)
        assert ids == list(text.encode()) and tokenizer.decode(ids) == text


def test_a_users_program_has_its_own_words(tmp_path: Path) -> None:
    spec = replace(a_spec(), program="tests.foreign_program:PROGRAM")
    state = state_of(spec)
    export(save(tmp_path / "saved", spec, state), spec, tmp_path / "out", file_bytes=10_000)
    found: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        found |= load_file(file)
    head = torch.cat([found.pop("mine.head.low"), found.pop("mine.head.high")])
    assert torch.equal(head.flatten(), state.pop("head")[0])
    assert set(found) == {f"mine.{name}" for name in state}
    assert all(torch.equal(found[f"mine.{name}"].flatten(), rows[0]) for name, rows in state.items())
    assert (tmp_path / "out" / "words.txt").read_bytes() == b"mine"


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    spec = a_spec()
    found = save(tmp_path / "saved", spec, state_of(spec))
    out = tmp_path / "out"
    with pytest.raises(Refused, match="give it a method foreign"):
        export(found, replace(spec, program="tests.slow_model:PROGRAM"), out)
    with pytest.raises(Refused, match=r"embedding is 256 x 32 there and 300 x 32 here.*export it with the program"):
        export(found, a_spec(vocabulary=300), out)
    data = (path for path in (tmp_path / "saved").rglob("*") if path.is_file() and path.suffix != ".json")
    shard = max(data, key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 6] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointCorrupt):
        export(found, spec, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    out.mkdir()
    with pytest.raises(Conflict, match="is there already"):
        export(found, spec, out)
