"""What a job file may say, and the sentence for everything it may not."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from api import chaos, schemas
from api.chaos import FaultRequest, Schedule
from api.documents import UnsupportedType, load_mapping
from api.plan_files import ClusterFile
from api.schemas import AddNodeRequest, JobFile, load_job_file, read
from orchestrator.domain import spec
from orchestrator.domain.errors import Refused
from orchestrator.domain.faults import FaultKind
from orchestrator.domain.kinds import KINDS, table

YAML, JSON = "application/yaml", "application/json"


def a_file(**changes: Any) -> dict[str, Any]:
    """A valid job file; `train__steps=0` changes one setting, `None` removes it."""
    file: dict[str, Any] = {
        "name": "byte-gpt",
        "program": "causal_lm",
        "data": {"files": ["{stdlib}"]},
        "train": {"steps": 150, "micro_batches": 8, "micro_batch_size": 2, "sequence": 64},
        "model": {"layers": 4},
    }
    for path, value in changes.items():
        *sections, name = path.split("__")
        place = file
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            del place[name]
        else:
            place[name] = value
    return file


def refusal(file: dict[str, Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        load_job_file(json.dumps(file), JSON)
    return caught.value


# --- mirror of the domain ------------------------------------------------------------------------------------------------

SECTIONS = [
    (schemas.JobFile, spec.JobSpec),
    (schemas.DataSection, spec.DataSpec),
    (schemas.TrainSection, spec.TrainSpec),
    (schemas.ParallelSection, spec.ParallelSpec),
    (schemas.CheckpointSection, spec.CheckpointSpec),
    (schemas.RecoverySection, spec.RecoverySpec),
]


@pytest.mark.parametrize(("model", "wanted"), SECTIONS, ids=lambda value: value.__name__)
def test_sections_have_the_fields_of_the_domain_and_no_others(model: type[BaseModel], wanted: Any) -> None:
    fields = {field.name: field for field in dataclasses.fields(wanted)}
    assert list(model.model_fields) == list(fields)
    for name, info in model.model_fields.items():
        has_default = (
            fields[name].default is not dataclasses.MISSING or fields[name].default_factory is not dataclasses.MISSING
        )
        assert info.is_required() != has_default, name


@pytest.mark.parametrize("exact", [True, False, "best_effort"])
def test_exact_is_yes_no_or_as_well_as_it_goes(exact: object) -> None:
    assert load_job_file(json.dumps(a_file(train__exact=exact)), JSON).train.exact == exact


@pytest.mark.parametrize("exact", ["true", 2, "best-effort"])
def test_any_other_exact_is_refused_in_one_sentence(exact: object) -> None:
    shown = repr(exact) if isinstance(exact, str) else exact
    assert refusal(a_file(train__exact=exact)).message == f"train.exact is {shown}: must be false, true or best_effort"


def test_a_minimal_file_gets_the_domains_defaults() -> None:
    loaded = load_job_file(json.dumps(a_file()), JSON)
    assert loaded == spec.JobSpec(
        name="byte-gpt",
        program="causal_lm",
        data=spec.DataSpec(files=("{stdlib}",)),
        train=spec.TrainSpec(steps=150, micro_batches=8, micro_batch_size=2, sequence=64),
        model={"layers": 4},
    )


def test_every_field_reaches_the_spec() -> None:
    changed = a_file(
        data__max_bytes=10**6,
        train__dtype="bf16",
        train__learning_rate=0.01,
        parallel__tp=2,
        parallel__pp=4,
        checkpoint__every=0,
        recovery__mirrors=0,
        recovery__backend="gloo",
        labels={"team": "a"},
    )
    loaded = load_job_file(json.dumps(changed), JSON)
    assert (loaded.data.max_bytes, loaded.train.dtype, loaded.train.learning_rate) == (10**6, "bf16", 0.01)
    assert (loaded.parallel.tp, loaded.parallel.pp, loaded.parallel.dp) == (2, 4, None)
    assert (loaded.checkpoint.every, loaded.recovery.mirrors, loaded.recovery.backend) == (0, 0, "gloo")
    assert loaded.labels == {"team": "a"}


def test_yaml_and_json_mean_the_same() -> None:
    assert load_job_file(yaml.safe_dump(a_file()), YAML) == load_job_file(json.dumps(a_file()), JSON)


def test_yaml_numbers_without_a_dot_are_numbers() -> None:
    text = yaml.safe_dump(a_file()) + "\n" + "recovery: {leave_s: 1}\n"
    loaded = load_job_file(text.replace("steps: 150", "steps: 150\n  learning_rate: 3e-3"), YAML)
    assert loaded.train.learning_rate == 3e-3
    assert loaded.recovery.leave_s == 1.0 and isinstance(loaded.recovery.leave_s, float)


def test_the_programs_own_settings_pass_unread() -> None:
    model = {"layers": 4, "kind": "x", "rope": {"base": 1e4}, "names": ["a", None, True]}
    assert load_job_file(json.dumps(a_file(model=model)), JSON).model == model


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"train__steps": 0}, "train.steps", "train.steps is 0: must be a whole number 1..1000000000"),
        ({"train__steps": True}, "train.steps", "train.steps is true: must be a whole number 1..1000000000"),
        ({"train__steps": 1.5}, "train.steps", "train.steps is 1.5: must be a whole number 1..1000000000"),
        (
            {"train__micro_batches": 5000},
            "train.micro_batches",
            "train.micro_batches is 5000: must be a whole number 1..4096",
        ),
        ({"train__dtype": "fp16"}, "train.dtype", "train.dtype is 'fp16': must be fp32 or bf16"),
        ({"train__beta1": 1}, "train.beta1", "train.beta1 is 1: must be a number at least 0 and less than 1"),
        ({"train__learning_rate": True}, "train.learning_rate", "train.learning_rate is true: must be a number 0..100"),
        ({"recovery__mirrors": 2}, "recovery.mirrors", "recovery.mirrors is 2: must be a whole number 0..1"),
        ({"recovery__backend": "mpi"}, "recovery.backend", "must be links, gloo or nccl"),
        ({"checkpoint__every": -1}, "checkpoint.every", "checkpoint.every is -1"),
        ({"checkpoint__restore_from": "a/b"}, "checkpoint.restore_from", "is 'a/b': must be an absolute path, or a URL"),
        ({"checkpoint__path": "s3://"}, "checkpoint.path", "is 's3://': must be an absolute path, or a URL"),
        ({"checkpoint__path": "memory://runs"}, "checkpoint.path", "must be an absolute path, or a URL"),
        ({"checkpoint__path": "file://host/runs"}, "checkpoint.path", "must be an absolute path, or a URL"),
        ({"data__files": []}, "data.files", "must be 1..1000 items"),
        ({"data__files": "a.txt"}, "data.files", "data.files is 'a.txt': must be a list"),
        ({"data__files": [3]}, "data.files[0]", "data.files[0] is 3: must be text"),
        ({"name": "a b"}, "name", "letters, digits, dots, dashes"),
        ({"name": "../x"}, "name", "letters, digits, dots, dashes"),
        ({"program": "os; rm"}, "program", "module:attribute"),
        ({"train": 3}, "train", "train is 3: must be a mapping"),
        ({"train__sequence": None}, "train.sequence", "train.sequence: is required"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_field_and_range(changes: dict[str, Any], field: str, sentence: str) -> None:
    error = refusal(a_file(**changes))
    assert sentence in error.message
    assert error.problems[0].field == field


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train__stepz": 3}, 'unknown key "stepz" of train; did you mean "steps"?'),
        ({"trian": {}}, 'unknown key "trian"; did you mean "train"?'),
        ({"recovery__mirorrs": 1}, 'unknown key "mirorrs" of recovery; did you mean "mirrors"?'),
        ({"train__zzz": 3}, 'unknown key "zzz" of train'),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(changes: dict[str, Any], sentence: str) -> None:
    error = refusal(a_file(**changes))
    assert error.message == sentence
    assert error.problems[0].allowed


def test_a_misspelt_key_comes_before_the_field_it_leaves_missing() -> None:
    error = refusal(a_file(train__steps=None, train__stepz=3))
    assert error.message == 'unknown key "stepz" of train; did you mean "steps"? (and 1 more)'
    assert [problem.field for problem in error.problems] == ["train.stepz", "train.steps"]


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"parallel__pp": 9}, "parallel.pp", "parallel.pp 9 needs at least 9 micro-batches"),
        (
            {"parallel__pp": 4, "parallel__dp": 3},
            "parallel.pp",
            "parallel.pp 4 x parallel.dp 3 needs at least 12 micro-batches",
        ),
        ({"parallel__dp": 9}, "parallel.dp", "needs at least 9 micro-batches"),
        ({"train__warmup_steps": 151}, "train.warmup_steps", "more than all 150 steps"),
        ({"train__min_learning_rate": 1}, "train.min_learning_rate", "above train.learning_rate"),
        ({"recovery__backend": "nccl"}, "recovery.backend", "nccl carries tensors of cuda only and train.device is cpu"),
        (
            {"recovery__backend": "gloo", "train__device": "cuda"},
            "recovery.backend",
            "train.device is cuda; set train.device to cpu or recovery.backend to links",
        ),
        ({"checkpoint__weights_only": True}, "checkpoint.weights_only", "checkpoint.restore_from names no checkpoint"),
        ({"parallel": {"tp": 2, "pp": 1, "dp": 1, "min_devices": 3}}, "parallel.min_devices", "uses only 2"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], field: str, sentence: str) -> None:
    error = refusal(a_file(**changes))
    assert sentence in error.message
    assert error.problems[0].field == field


def test_a_job_shorter_than_the_default_warm_up_is_fine() -> None:
    assert load_job_file(json.dumps(a_file(train__steps=3)), JSON).train.warmup_steps == 10


# --- documents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("a: 1\na: 2", YAML, '"a" is given twice'),
        ('{"a": 1, "a": 2}', JSON, '"a" is given twice'),
        ("a: &x [1]\nb: *x", YAML, "aliases are not read"),
        ("a: [", YAML, "not YAML at line 1"),
        ("{", JSON, "not JSON at line 1 column 2"),
        ("- 1", YAML, "must be a mapping of settings, not a list"),
        ("", YAML, "must be a mapping of settings, not nothing"),
        ("a: .nan", YAML, "a is nan: must be a finite number"),
        ('{"a": [1, Infinity]}', JSON, "a[1] is inf: must be a finite number"),
        ("1: x", YAML, "key '1' must be text"),
        ("a: !!python/object/apply:os.getcwd []", YAML, "not YAML"),
        ("a: !!binary aGk=", YAML, "which JSON does not have"),
        ("a: " + "9" * 5000, YAML, "not YAML: Exceeds the limit"),
        ('{"a": ' + "9" * 5000 + "}", JSON, "not JSON: Exceeds the limit"),
        ("a: 1e999", YAML, "a is inf: must be a finite number"),
        ("a: 1\n---\nb: 2", YAML, "not YAML at line 2"),
        ('{"a": "\\ud800"}', JSON, "not text"),
        ('{"a": {"b\\ud800": 1}}', JSON, "a key of a holds a character that is not text"),
        ("[" * 100_000, JSON, "nested more than 50 levels"),
        ('{"a":' * 60 + "1" + "}" * 60, JSON, "nested more than 50 levels"),
        ("{a: " * 60 + "1" + "}" * 60, YAML, "nested more than 50 levels"),
    ],
)
def test_a_document_that_json_could_not_hold_is_refused(text: str, kind: str, sentence: str) -> None:
    with pytest.raises(Refused) as caught:
        load_mapping(text, kind)
    assert sentence in caught.value.message


def test_yaml_has_no_surprises() -> None:
    text = "day: 2026-01-01\nat: 12:30\nmode: 010\nno: yes\non: off\nbig: 1_000\nempty:\ntilde: ~"
    assert load_mapping(text, YAML) == {
        "day": "2026-01-01",
        "at": "12:30",
        "mode": "010",
        "no": "yes",
        "on": "off",
        "big": "1_000",
        "empty": None,
        "tilde": None,
    }
    text = "a: 3e-4\nb: -1.5\nc: .5\nd: 0\ne: -12\nf: true\ng: 1.\nh: 'true'"
    found = load_mapping(text, YAML)
    assert found == {"a": 3e-4, "b": -1.5, "c": 0.5, "d": 0, "e": -12, "f": True, "g": 1.0, "h": "true"}
    assert isinstance(found["d"], int) and isinstance(found["g"], float)


def test_another_content_type_is_said_to_be_unreadable() -> None:
    with pytest.raises(UnsupportedType, match="send application/json or application/yaml"):
        load_mapping("a: 1", "text/plain")


# --- commands ------------------------------------------------------------------------------------------------------------


def test_an_unknown_kind_of_node_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refused, match=r'must be one of V100, .*H100, H200, B200, cpu; did you mean "H100"'):
        read(AddNodeRequest, {"kind": "h10"}).refuse_unless(table())
    read(AddNodeRequest, {"kind": "X1"}).refuse_unless(table([replace(KINDS["H100"], name="X1")]))


def test_a_cluster_s_mistyped_words_are_told_what_was_probably_meant() -> None:
    with pytest.raises(Refused) as refused:
        read(ClusterFile, {"nodes": [{"kind": "H100", "cuont": 2}]})
    (only,) = refused.value.problems
    assert only.message == 'unknown key "cuont" of nodes[0]; did you mean "count"?'
    with pytest.raises(Refused, match=r'unknown key "bf16_tflop" of kinds\.X1; did you mean "bf16_tflops"'):
        read(ClusterFile, {"nodes": [{"kind": "X1"}], "kinds": {"X1": {"bf16_tflop": 1}}})
    with pytest.raises(Refused, match="kind 'h10' is not known; did you mean \"H100\""):
        read(ClusterFile, {"nodes": [{"kind": "h10"}]}).to_sketch()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"kind": "kill_rank", "job": "job-1"}, "kill_rank needs rank"),
        ({"kind": "kill_node"}, "kill_node needs node"),
        ({"kind": "kill_node", "node": "n", "rank": 1}, "kill_node takes no rank, only node"),
        ({"kind": "kill"}, "kill needs job"),
        ({"kind": "node_kill"}, "node_kill needs node, or job to pick one of its nodes"),
        ({"kind": "node_kill", "node": "n", "at": "in_vote"}, "node_kill takes no at"),
        ({"kind": "kill", "job": "j", "at": "in_voting"}, "at is 'in_voting': must be one of in_evaluation, in_compute"),
        ({"kind": "clock_jump"}, "clock_jump needs jump_s"),
        ({"kind": "supervisor_kill", "rank": 1}, "supervisor_kill takes no rank, only beyond_mirrors and job and seed"),
        ({"kind": "slow", "job": "j", "exit_code": 3}, "slow takes no exit_code"),
    ],
)
def test_a_fault_takes_the_fields_of_its_kind(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        read(FaultRequest, body).checked()


def test_every_kind_of_fault_is_described_and_drawn_kinds_are_kinds() -> None:
    assert set(chaos.KINDS) == set(FaultKind)
    assert {FaultKind(kind) for kind in chaos.DEFAULT_KINDS} <= set(FaultKind)


def test_a_schedule_lists_faults_or_draws_them() -> None:
    assert read(Schedule, {"seed": 3, "faults": [{"kind": "kill", "rank": 1}]}).num_faults == 20
    with pytest.raises(Refused, match="faults, or kinds and num_faults, not both"):
        read(Schedule, {"faults": [{"kind": "kill"}], "num_faults": 3})


def test_every_request_model_forbids_unknown_keys() -> None:
    models = [item for item in vars(schemas).values() if isinstance(item, type) and issubclass(item, schemas.Request)]
    models += [item for item in vars(chaos).values() if isinstance(item, type) and issubclass(item, schemas.Request)]
    assert len(models) >= 10
    assert all(model.model_config["extra"] == "forbid" for model in models)
    assert JobFile in models
