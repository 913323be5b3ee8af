"""Secrets are covered in whatever text they turn up in, at any cut, and job files have no other place for them."""

from __future__ import annotations

import io
import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from api.logfiles import piece
from api.schemas import load_job_file
from deploy import secret_files
from orchestrator.adapters.secret_folder import SecretFolder
from orchestrator.domain.errors import Refused
from orchestrator.domain.host_events import HostFailed, RankExited
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.secrecy import Veil
from tests.desk import a_spec
from tests.samples import DEAD

CANARY = "c4n4ry-9f8e7d6c5b4a"
KEY = "-----BEGIN KEY-----\nMIIEabcdefgh\nijklmnopqrst\n-----END KEY-----"
JOB = {
    "name": "byte-gpt",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}"]},
    "train": {"steps": 3, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64},
}


def read(**changes: Any) -> Any:
    import json

    return load_job_file(json.dumps(JOB | changes), "application/json")


@given(some.binary(max_size=60), some.binary(max_size=60), some.integers(0, 150), some.integers(1, 150))
def test_no_cut_of_a_log_shows_a_secret_and_every_other_byte_is_where_it_was(
    before: bytes, after: bytes, start: int, size: int
) -> None:
    secret = CANARY.encode()
    text = before + secret + after
    shown = piece(io.BytesIO(text), start, size, Veil([CANARY]))
    whole = before + b"*" * len(secret) + after
    assert len(shown) == len(text[start : start + size])
    # Beyond the secret only what could be the beginning of another one, at the end, is covered too.
    assert all(one in (want, ord("*")) for one, want in zip(shown, whole[start : start + size], strict=True))
    assert not any(
        secret[at : at + 4] in shown and secret[at : at + 4] not in before + after for at in range(len(secret) - 3)
    )


def test_a_value_with_lines_is_covered_line_by_line_and_in_what_a_host_tells() -> None:
    veil = Veil([CANARY, KEY])
    device = Device(NodeId(CANARY), 0)
    told = RankExited(
        device=device,
        pid=7,
        exit_code=1,
        report=DEAD,
        message=f"no: {CANARY}",
        log_tail=("x", "MIIEabcdefgh"),
        stack=(KEY,),
    )
    covered = veil.over(told)
    assert (
        covered.message == "no: [redacted]" and covered.log_tail == ("x", "[redacted]") and covered.stack == ("[redacted]",)
    )
    assert covered.device == device and covered == replace(
        told, message=covered.message, log_tail=covered.log_tail, stack=covered.stack
    )
    assert not Veil() and Veil().over(told) is told
    plain = HostFailed(message="nothing of it")
    assert veil.over(plain) == plain


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("model.api_key", {"model": {"api_key": CANARY}}),
        ("model.hub.accessToken", {"model": {"hub": {"accessToken": CANARY}}}),
        ("model.api_key[1]", {"model": {"api_key": ["x", CANARY]}}),
        ("model.auth_token[1][0]", {"model": {"auth_token": ["x", [CANARY]]}}),
        ("model.hub", {"model": {"hub": {f"Bearer {CANARY}": 1}}}),
        ("model.list[1]", {"model": {"list": ["x", f"Bearer {CANARY}"]}}),
        ("labels.password", {"labels": {"password": CANARY}}),
        ("data.files[0]", {"data": {"files": [f"s3://me:{CANARY}@bucket/text"]}}),
        ("checkpoint.path", {"checkpoint": {"path": f"s3://me:{CANARY}@bucket/runs"}}),
        ("checkpoint.restore_from", {"checkpoint": {"restore_from": f"s3://bucket/runs?token={CANARY}"}}),
    ],
)
def test_a_secret_in_a_job_file_is_refused_without_being_said(place: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="everstep secret set") as refused:
        read(**changes)
    (problem,) = refused.value.problems
    assert problem.field == place and problem.value is None and CANARY not in refused.value.message


@pytest.mark.parametrize("changes", [{"token": CANARY}, {"model": [{"secret": CANARY}]}, {"secrets": {"A b": "x"}}])
def test_what_is_wrong_with_a_file_is_said_without_the_secrets_in_it(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        read(**changes)
    assert CANARY not in f"{refused.value.message} {refused.value.problems}"


def test_words_of_a_vocabulary_and_names_of_secrets_are_no_secrets() -> None:
    read(labels={"note": "Basic training, bearer of transformers."}, model={"basic transformer": 1, "api_key": "short"})
    spec = read(model={"pad_token": "<|padding|>", "tokenizer": "byte-level", "seed": 7}, secrets={"HF_TOKEN": "hf-token"})
    assert spec.secrets == {"HF_TOKEN": "hf-token"}


@pytest.mark.parametrize(
    "variable", ["PATH", "TMPDIR", "LD_PRELOAD", "PYTHONPATH", "EVERSTEP_TOKEN", "RAY_AUTH_MODE", "1A", "A-B"]
)
def test_a_secret_takes_no_variable_that_is_somebody_elses(variable: str) -> None:
    with pytest.raises(Refused, match="an environment variable that is nobody else's"):
        read(secrets={variable: "x"})


def test_values_are_kept_in_files_of_their_owner_and_belong_to_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def everstep_secret(*words: str, given: str = "") -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        return secret_files.main(["--state-dir", str(tmp_path), *words])

    assert everstep_secret("set", "hf", "--project", "mine", given=CANARY + "\n") == 0
    assert everstep_secret("set", "short", given="tiny\n") == 2
    file = tmp_path / "secrets" / "mine" / "hf"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    folder = SecretFolder(tmp_path / "secrets")
    mine = replace(a_spec(), project="mine", secrets={"HF_TOKEN": "hf"})
    assert folder.environment(mine) == {"HF_TOKEN": CANARY} and folder.veil(mine).over_text(CANARY) == "[redacted]"
    with pytest.raises(
        Refused, match=r"secret 'hf' of project other is not there .* everstep secret set hf --project other"
    ):
        folder.environment(replace(mine, project="other"))
    assert not folder.veil(replace(mine, project="other"))
    capsys.readouterr()
    assert everstep_secret("ls") == 0 and capsys.readouterr().out == "mine  hf\n"
    assert everstep_secret("set", "hf", "--json", given=CANARY) == 0
    assert json.loads(capsys.readouterr().out) == {"project": "default", "name": "hf", "logs_cleaned": 0}
    assert everstep_secret("rm", "hf") == 0
    assert everstep_secret("rm", "hf", "--project", "mine") == 0 and everstep_secret("rm", "hf") == 102
    assert not list(folder.names()) and CANARY not in str(list(file.parent.iterdir()))


def test_a_value_that_is_replaced_or_removed_leaves_no_log_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "jobs" / "job-1" / "logs"
    logs.mkdir(parents=True)
    across = "x" * ((1 << 20) - 5)  # the value lies across the edge of what is read at a time
    text = f"{across}{CANARY} once\nand {CANARY} again, {CANARY[:-1]}"
    (logs / "n0-0.log").write_text(text)
    (logs / "n0-0.log.1").write_text(f"before: {CANARY}")
    (logs / "n0-1.log").write_text("nothing")
    SecretFolder(tmp_path / "secrets").put("default", "hf", CANARY)

    def everstep_secret(*words: str, given: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        assert secret_files.main(["--state-dir", str(tmp_path), *words]) == 0
        return capsys.readouterr().out

    assert "logs" not in everstep_secret("set", "hf", given=CANARY), "the same again is still covered when it is read"
    assert "taken out of 2 logs" in everstep_secret("set", "hf", given="another-value-1")
    assert (logs / "n0-0.log").read_text() == text.replace(CANARY, "*" * len(CANARY))
    assert CANARY not in (logs / "n0-0.log.1").read_text() and (logs / "n0-1.log").read_text() == "nothing"
    (logs / "n0-1.log").write_text("said another-value-1\n")
    assert "taken out of 1 logs" in everstep_secret("rm", "hf")
    assert (logs / "n0-1.log").read_text() == f"said {'*' * 15}\n"


def test_no_value_hides_nothing() -> None:
    assert Veil([""]).over_text("two words") == "two words" and not Veil([""])
