"""The service's configuration: one model from a file, the environment and flags, and who said what."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from api.config import Config, schema
from api.config_sources import leaves, resolve, value_of, variable_of
from deploy.configured import assignments, tell_jobs
from orchestrator.domain.errors import Refused
from worker.lodging import Policy

YAML = "api:\n  port: 8265\n  allowed_hosts: [train.example, localhost]\nlog: {level: debug}\n"
TOML = '[api]\nport = 8265\nallowed_hosts = ["train.example", "localhost"]\n[log]\nlevel = "debug"\n'
JSON = json.dumps({"api": {"port": 8265, "allowed_hosts": ["train.example", "localhost"]}, "log": {"level": "debug"}})


@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.yml", YAML), ("c.toml", TOML), ("c.json", JSON)])
def test_every_kind_of_file_says_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = resolve({}, {}, tmp_path / name)
    assert found.config.api.port == 8265 and found.config.api.allowed_hosts == ("train.example", "localhost")
    assert found.config.log.level == "debug" and found.config.redis == Config().redis
    assert found.origins["api.port"] == f"file {tmp_path / name}" and found.origins["api.chaos"] == "default"


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("api: {port: 1, grace_s: 5, max_metric_jobs: 7}\n")
    environ = {"EVERSTEP_CONFIG": str(file), "EVERSTEP_API_PORT": "2", "EVERSTEP_API_GRACE_S": "6", "HOME": "/"}
    found = resolve({"api.port": "3", "api.chaos": None}, environ)
    assert (found.config.api.port, found.config.api.grace_s, found.config.api.max_metric_jobs) == (3, 6, 7)
    origins = [found.origins[f"api.{name}"] for name in ("port", "grace_s", "max_metric_jobs", "chaos")]
    assert origins == ["flag api.port", "environment EVERSTEP_API_GRACE_S", f"file {file}", "default"]


def test_a_file_of_the_state_directory_is_found_and_two_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[api]\nport = 5\n")
    assert resolve({"state_dir": str(tmp_path)}, {}).config.api.port == 5
    assert resolve({}, {"EVERSTEP_STATE_DIR": str(tmp_path)}).file == tmp_path / "config.toml"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match="are both there; keep one"):
        resolve({"state_dir": str(tmp_path)}, {})


def test_text_becomes_what_the_field_takes() -> None:
    environ = {"EVERSTEP_API_ALLOWED_HOSTS": "a.example, b.example", "EVERSTEP_SUPERVISOR_METRICS_PORT": "null"}
    found = resolve({"api.chaos": "true"}, environ).config
    assert found.api.allowed_hosts == ("a.example", "b.example") and found.supervisor.metrics_port is None
    assert found.api.chaos is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("api: {prot: 1}\n", r'unknown key "prot" of api; did you mean "port"\? \(file .*c.yaml\)'),
        ("apii: {}\n", r'unknown key "apii"; did you mean "api"\?'),
        ("api: {port: 70000}\n", r"api.port is 70000: must be a whole number 0..65535 \(file .*c.yaml\)"),
        ("log: {level: loud}\n", r"log.level is 'loud': must be debug, info, warning or error"),
        ("redis: {password: a, password_file: b}\n", "password and password_file are both given; leave one out"),
        ("api: 3\n", "api.* must be a mapping"),
        ("api: {port: 1, port: 2}\n", '"port" is given twice'),
        ("- 1\n", "must be a mapping of settings, not a list"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(Refused, match=said):
        resolve({}, {}, tmp_path / "c.yaml")


def test_a_misspelt_variable_and_flag_are_told_what_was_meant() -> None:
    with pytest.raises(Refused, match='EVERSTEP_API_PROT; did you mean "EVERSTEP_API_PORT"'):
        resolve({}, {"EVERSTEP_API_PROT": "1"})
    with pytest.raises(Refused, match=r'no setting "api\.prot"; did you mean "api\.port"'):
        resolve({"api.prot": "1"}, {})
    with pytest.raises(Refused, match=r"api.port is 'x'.*\(environment EVERSTEP_API_PORT\)"):
        resolve({}, {"EVERSTEP_API_PORT": "x"})
    # Others' variables are not ours to judge.
    assert resolve({}, {"EVERSTEP_URL": "http://x", "EVERSTEP_CLUSTER": "1"}).config == Config()


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read: No such file"):
        resolve({}, {}, tmp_path / "gone.yaml")
    (tmp_path / "c.ini").write_text("")
    with pytest.raises(Refused, match=r"is none of \.yaml, \.yml, \.toml, \.json"):
        resolve({}, {}, tmp_path / "c.ini")
    (tmp_path / "c.toml").write_text("a = [")
    with pytest.raises(Refused, match=r"c\.toml: not TOML"):
        resolve({}, {}, tmp_path / "c.toml")


def test_every_setting_has_a_variable_a_description_and_no_secret_is_shown() -> None:
    names = [name for name, _ in leaves()]
    assert len({variable_of(name) for name in names}) == len(names) > 20
    found = resolve({"redis.password": "canary-1"}, {}).config
    assert "canary-1" not in json.dumps(value_of(found, "redis.password")) and "canary-1" not in repr(found)
    made = schema()
    assert made["additionalProperties"] is False
    assert made["$defs"]["ApiSection"]["properties"]["port"]["description"] == "0: any that is free."
    assert found.api_settings("9").max_body_bytes == found.api.max_body_bytes


def test_no_password_is_given_among_the_arguments_of_a_process() -> None:
    with pytest.raises(Refused, match=r"give redis\.password_file, or EVERSTEP_REDIS_PASSWORD") as refused:
        assignments(["log.level=debug", "redis.password=canary-1"])
    assert "canary-1" not in refused.value.message
    assert assignments(["redis.password_file=/run/p"]) == {"redis.password_file": "/run/p"}


@pytest.mark.parametrize(
    "given", [{}, {"jobs.user": "service", "jobs.user_ids": "70000-70009", "jobs.max_memory_gib": "64"}]
)
def test_hosts_are_told_what_jobs_may_do_here(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """They read no configuration: it is in their environment, in words that a configuration takes, too."""
    for name, _ in leaves():
        monkeypatch.setenv(variable_of(name), "")  # put back afterwards
        monkeypatch.delenv(variable_of(name))
    config = resolve(given, {}).config
    tell_jobs(config)
    found = Policy.of(os.environ)
    assert (found.user, f"{found.first_id}-{found.last_id}") == (config.jobs.user, config.jobs.user_ids)
    assert found.max_memory_bytes == config.jobs.max_memory_gib << 30
    assert (found == Policy()) == (not given), "what nobody has told is the configuration's default"
    assert resolve({}, os.environ).config.jobs == config.jobs
    with pytest.raises(Refused, match="must begin with the lower number"):
        resolve({"jobs.user_ids": "9-7"}, {})
