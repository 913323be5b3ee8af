"""What the causal language model says of itself, and which settings it refuses with which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from orchestrator.domain.errors import Refused
from orchestrator.domain.spec import JobSpec, TrainSpec
from tests.tiny_model import a_spec
from worker.program import load_program
from worker.programs.causal_lm import PROGRAM


def test_it_is_a_program() -> None:
    assert load_program("causal_lm") is PROGRAM


def test_lines_carry_their_split_dimension_outermost() -> None:
    profile = PROGRAM.describe(a_spec())
    lines = {line.name: line for line in profile.lines}
    assert profile.num_layers == 4
    assert {name.removeprefix("layers.2."): line.shape for name, line in lines.items() if line.layers == (2,)} == {
        "q": (32, 32),
        "k": (16, 32),
        "v": (16, 32),
        "o": (32, 32),
        "gate": (48, 32),
        "up": (48, 32),
        "down": (48, 32),
        "attention_norm": (32,),
        "ffn_norm": (32,),
    }
    assert lines["embedding"].layers == (0,)
    assert lines["head"].layers == lines["final_norm"].layers == (3,)
    for line in profile.lines:
        assert line.split == line.decay == (len(line.shape) == 2)
    assert profile.num_params == 2 * 256 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32


def test_a_tied_head_is_a_second_use_of_the_embedding() -> None:
    lines = {line.name: line for line in PROGRAM.describe(a_spec(tied=True)).lines}
    assert lines["embedding"].layers == (0, 3)
    assert "head" not in lines


def test_divisors_are_named_as_the_user_knows_them() -> None:
    assert {d.field: d.value for d in PROGRAM.describe(a_spec()).divisors} == {
        "model.heads": 8,
        "model.kv_heads": 4,
        "model.ffn": 48,
        "model.vocabulary": 256,
        "train.sequence": 16,
    }


@pytest.mark.parametrize(
    ("model", "train", "field", "words"),
    [
        ({"head": 4}, {}, "model.head", "did you mean 'heads'"),
        ({"experts": 4}, {}, "model.experts", "use layers, width"),
        ({"layers": None}, {}, "model.layers", "is missing"),
        ({"layers": "two"}, {}, "model.layers", "must be a whole number"),
        ({"layers": True}, {}, "model.layers", "must be a whole number"),
        ({"width": 32.0}, {}, "model.width", "must be a whole number"),
        ({"tied": 1}, {}, "model.tied", "true or false"),
        ({"layers": 0}, {}, "model.layers", "at least 1"),
        ({"kv_heads": 0}, {}, "model.kv_heads", "at least 1"),
        ({"heads": 5, "kv_heads": 5}, {}, "model.heads", "does not divide model.width 32"),
        ({"heads": 32}, {}, "model.heads", "even"),
        ({"kv_heads": 3}, {}, "model.kv_heads", "does not divide model.heads 8"),
        ({"vocabulary": 128}, {}, "model.vocabulary", "256"),
        ({"dropout": 1.0}, {}, "model.dropout", "outside"),
        ({"dropout": float("nan")}, {}, "model.dropout", "outside"),
        ({"rope_theta": 0}, {}, "model.rope_theta", "above 1"),
        ({}, {"sequence": 0}, "train.sequence", "at least 1"),
        ({}, {"micro_batches": 0}, "train.micro_batches", "at least 1"),
        ({}, {"micro_batch_size": -1}, "train.micro_batch_size", "at least 1"),
        ({}, {"steps": 0}, "train.steps", "at least 1"),
        ({}, {"dtype": "fp16"}, "train.dtype", "fp32 or bf16"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    model: dict[str, object], train: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(Refused) as refused:
        PROGRAM.describe(a_spec(train=train, **model))
    assert [problem.field for problem in refused.value.problems] == [field]
    assert words in refused.value.message
    assert refused.value.message.startswith(field)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(Refused) as refused:
        PROGRAM.describe(a_spec(layers=0, kv_heads=3, train={"steps": 0}))
    assert {p.field for p in refused.value.problems} == {"model.layers", "model.kv_heads", "train.steps"}


def test_kv_heads_default_to_heads() -> None:
    lines = {line.name: line for line in PROGRAM.describe(a_spec(kv_heads=None)).lines}
    assert lines["layers.1.k"].shape == (32, 32)


def test_the_example_is_a_model_of_at_most_half_a_million_parameters() -> None:
    path = Path(__file__).parents[2] / "worker" / "examples" / "byte-gpt.yaml"
    example = yaml.safe_load(path.read_text())
    assert set(example) <= {field.name for field in dataclasses.fields(JobSpec)}
    spec = dataclasses.replace(a_spec(), model=example["model"], train=TrainSpec(**example["train"]))
    assert PROGRAM.describe(spec).num_params <= 500_000
