"""What a machine's check finds: each part with something wrong in it, and two machines that meet."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from pathlib import Path

import pytest
import torch

from orchestrator.adapters import checking
from orchestrator.domain.errors import Unavailable
from orchestrator.recovery import admission
from worker import nodecheck, selftest
from worker.nodecheck import PAIR_BYTES, CheckOrder, Meeting, check
from worker.outcome import Outcome

LOOPBACK = "127.0.0.1"


def test_a_machine_that_is_well_says_what_was_tried(tmp_path: Path) -> None:
    found = check(CheckOrder(num_devices=2, folder=str(tmp_path)))
    assert not found.wrong and not found.pair_wrong and found.product_s > 0
    assert "products of matrices are right" in found.said and "written and read again" in found.said
    assert "no sum with a peer, because there is no other node" in found.said
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    found = check(CheckOrder(num_devices=1, folder=str(tmp_path / "not there")))
    assert len(found.wrong) == 1 and "cannot be written" in found.wrong[0]


def test_a_product_with_one_wrong_element_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 255 * 127**2 needs 22 bits, 2**16 * SIZE more than fp32 has: the sums are rounded, as those of a broken unit.
    monkeypatch.setattr(nodecheck, "LIMIT", 1 << 16)
    found = check(CheckOrder(num_devices=1, folder=str(tmp_path)))
    assert found.wrong and "elements of a product of matrices are wrong" in found.wrong[0]


def test_an_accelerator_that_a_job_fills_is_not_tested_and_nothing_is_held_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [(Outcome.PASSED, "passed", 700.0), (Outcome.BUSY, "it could not be tested, its memory is in use", 0.0)]
    monkeypatch.setattr(nodecheck, "_selftest", lambda index: answers[index])
    wrong: list[str] = []
    untried: list[str] = []
    said: list[str] = []
    assert nodecheck._accelerators(2, wrong, untried, said) == 700.0 and not wrong and not untried
    assert said[0] == "device 1: it could not be tested, its memory is in use"


def test_a_full_accelerator_says_that_it_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(device: torch.device) -> tuple[str, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    monkeypatch.setattr(selftest, "examine", full)
    monkeypatch.setattr("sys.argv", ["selftest", "0"])
    selftest.main()
    answer = json.loads(capsys.readouterr().out)
    assert not answer["passed"] and answer["outcome"] == Outcome.BUSY and "memory is in use" in answer["message"]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", Outcome.UNUSABLE),
        ("CUDA error: an illegal memory access was encountered", Outcome.WRONG),
    ],
)
def test_a_device_that_lets_nobody_in_is_told_from_a_broken_one(
    said: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(device: torch.device) -> tuple[str, ...]:
        raise RuntimeError(f"{said}\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(selftest, "examine", closed)
    monkeypatch.setattr("sys.argv", ["selftest", "0"])
    selftest.main()
    answer = json.loads(capsys.readouterr().out)
    assert answer["outcome"] == outcome and said in answer["message"] and not answer["passed"]


def test_a_self_test_that_does_not_end_is_said_and_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(sleeper))
    monkeypatch.setattr(nodecheck, "SELFTEST_S", 0.2)
    wrong: list[str] = []
    untried: list[str] = []
    nodecheck._accelerators(1, wrong, untried, [])
    assert not wrong and "did not end within 0.2 s" in untried[0]


def test_two_machines_meet(tmp_path: Path) -> None:
    async def both() -> str:
        async with checking.peer("n-2", LOOPBACK, (), os.environ) as meeting:
            order = CheckOrder(num_devices=1, folder=str(tmp_path), meeting=meeting)
            found = await checking.run_check(order, (), os.environ)
            assert not found.wrong and not found.pair_wrong
            return found.said

    assert "with n-2 took" in asyncio.run(both())


def test_a_peer_that_nobody_reaches_is_said_and_the_rest_is_tried(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    meeting = Meeting(peer="n-2", address=LOOPBACK, port=port, secret="ab" * 16)
    found = check(CheckOrder(num_devices=1, folder=str(tmp_path), meeting=meeting))
    assert "no sum with n-2" in found.pair_wrong and not found.wrong and "written" in found.said


def test_a_peer_that_sends_something_else_is_found(tmp_path: Path) -> None:
    def garbage(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            left = 32 + PAIR_BYTES
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
            connection.sendall(bytes(PAIR_BYTES))
            total = connection.recv(4, socket.MSG_WAITALL)
            connection.sendall(total)

    with socket.create_server((LOOPBACK, 0)) as server:
        thread = threading.Thread(target=garbage, args=(server,))
        thread.start()
        meeting = Meeting(peer="n-2", address=LOOPBACK, port=server.getsockname()[1], secret="ab" * 16)
        found = check(CheckOrder(num_devices=1, folder=str(tmp_path), meeting=meeting))
        thread.join()
    assert found.pair_wrong == "the sum with n-2 came out wrong"


def test_a_check_that_says_nothing_is_no_finding() -> None:
    with pytest.raises(Unavailable, match="said nothing"):
        asyncio.run(checking.run_check(CheckOrder(num_devices=1, folder="/"), ("false",), os.environ))


def test_a_check_that_is_only_slow_is_not_begun_anew_beside_the_first() -> None:
    assert checking.MEET_S + checking.CHECK_S < admission.ASK_AGAIN_S
