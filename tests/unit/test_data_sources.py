"""Which text is read, in which order, and what is refused with which words."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path

import pytest
import torch

from orchestrator.domain.errors import Refused
from orchestrator.domain.spec import DataSpec
from worker.data.sources import byte_unigram_entropy, digest, load, num_samples, require_same


def text_of(data: DataSpec) -> bytes:
    return bytes(load(data).numpy())


def test_files_are_joined_in_order_of_path_and_read_once(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_bytes("dritté".encode())
    data = DataSpec(files=(f"{tmp_path}/*.md", f"{tmp_path}/**/*.*"))
    assert text_of(data) == b"first\0second\0" + "dritté".encode()


def test_records_of_a_jsonl_file_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two", "text": "no"}\n{"body": ""}\n')
    assert text_of(DataSpec(files=(f"{tmp_path}/a.jsonl",), text_field="body")) == b"one\0two"


@pytest.mark.parametrize("limit", [1, 5, 6, 8, 12, 13, 100])
def test_max_bytes_cuts_the_text(tmp_path: Path, limit: int) -> None:
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "b.txt").write_bytes(b"second")
    assert text_of(DataSpec(files=(f"{tmp_path}/*.txt",), max_bytes=limit)) == b"first\0second"[:limit]


def test_empty_files_under_a_glob_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    (tmp_path / "b.py").write_bytes(b"text")
    assert text_of(DataSpec(files=(f"{tmp_path}/*.py",))) == b"text"


def test_stdlib_is_read_without_what_was_installed_beside_it() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    tokens = load(DataSpec(files=("{stdlib}/json/**/*.py",)))
    expected = b"\0".join(path.read_bytes() for path in sorted(root.glob("json/*.py")) if path.stat().st_size)
    assert bytes(tokens.numpy()) == expected
    assert tokens.dtype == torch.uint8
    with pytest.raises(Refused, match="matches no file"):
        load(DataSpec(files=("{stdlib}/site-packages/*.py",)))


def refusals(tmp_path: Path) -> dict[str, tuple[DataSpec, str]]:
    """name -> (spec, words that must be in the sentence)."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "also_empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"x")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nnot json\n')
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "x"}))
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    return {
        "no match": (DataSpec(files=(f"{tmp_path}/*.rst",)), "*.rst"),
        "no globs": (DataSpec(files=()), "at least one"),
        "dangling": (DataSpec(files=(f"{tmp_path}/dangling.txt",)), "dangling.txt"),
        "empty": (DataSpec(files=(f"{tmp_path}/empty.txt",)), "empty.txt, which is empty"),
        "all empty": (DataSpec(files=(f"{tmp_path}/*empty.txt",)), "only empty files"),
        "suffix": (DataSpec(files=(f"{tmp_path}/*.png",)), "image.png, which is none of .txt"),
        "not json": (DataSpec(files=(f"{tmp_path}/bad.jsonl",)), "bad.jsonl:2, which is not JSON"),
        "no field": (DataSpec(files=(f"{tmp_path}/other.jsonl",)), "other.jsonl:1 has no text"),
        "max_bytes": (DataSpec(files=(f"{tmp_path}/*.txt",), max_bytes=0), "at least 1"),
    }


@pytest.mark.parametrize(
    "name",
    ["no match", "no globs", "dangling", "empty", "all empty", "suffix", "not json", "no field", "max_bytes"],
)
def test_text_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    data, words = refusals(tmp_path)[name]
    with pytest.raises(Refused) as refused:
        load(data)
    assert words in refused.value.message
    assert refused.value.problems[0].field.startswith("data.")


def test_an_unreadable_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    # The first page of a process's memory is mapped for nobody, so that even root is refused.
    (tmp_path / "secret.txt").symlink_to("/proc/self/mem")
    with pytest.raises(Refused, match=r"secret\.txt, which cannot be read \(Input/output error\)"):
        load(DataSpec(files=(f"{tmp_path}/secret.txt",)))


def test_samples_need_one_token_more_than_their_length() -> None:
    assert num_samples(torch.zeros(129, dtype=torch.uint8), 128) == 1
    assert num_samples(torch.zeros(256, dtype=torch.uint8), 128) == 1
    assert num_samples(torch.zeros(257, dtype=torch.uint8), 128) == 2
    with pytest.raises(Refused, match="the text has 128 bytes and one sample needs 129"):
        num_samples(torch.zeros(128, dtype=torch.uint8), 128)


def test_entropy_of_known_texts() -> None:
    assert byte_unigram_entropy(torch.zeros(10, dtype=torch.uint8)) == 0.0
    assert byte_unigram_entropy(torch.arange(256).to(torch.uint8)) == pytest.approx(math.log(256))
    assert byte_unigram_entropy(torch.tensor([1, 1, 1, 2], dtype=torch.uint8)) == pytest.approx(0.5623351)


def test_another_text_than_the_described_one_is_refused() -> None:
    described = torch.tensor([1, 2, 3], dtype=torch.uint8)
    require_same(described, digest(described))
    with pytest.raises(Refused, match="give every node the same files"):
        require_same(torch.tensor([1, 2, 4], dtype=torch.uint8), digest(described))
