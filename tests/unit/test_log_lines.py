"""Logs of many ranks as one: every line once, in the order of time, however little is read at a time."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from itertools import groupby, pairwise
from pathlib import Path
from unittest import mock

import pytest

from api import logfiles, loglines
from api.loglines import Asked, Line
from api.projections import instant
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.secrecy import Veil
from worker import logtimes
from worker.logs import bound
from worker.logtimes import LogTimes

DEVICES = tuple(Device(NodeId(f"n{number}"), number % 2) for number in range(3))


class Logs:
    """Written to as ranks do, and looked at as a host does. now: wall clock, whole seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1_790_000_000.0
        self.times = LogTimes(every_s=0)

    def path(self, device: Device) -> Path:
        return self.folder / f"{device.node}-{device.index}.log"

    def write(self, device: Device, text: str) -> None:
        with self.path(device).open("a", newline="") as file:
            file.write(text)
        os.utime(self.path(device), (self.now, self.now))

    def look(self) -> None:
        self.times.note((self.path(device) for device in DEVICES), self.now)
        self.now += 1

    def read(self, asked: Asked = Asked(), max_bytes: int = 1 << 20, devices: Iterable[Device] = DEVICES) -> loglines.Found:
        return loglines._read(self.folder, tuple(devices), asked, max_bytes, Veil())


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def texts(lines: Iterable[Line]) -> list[str]:
    return [line.text for line in lines]


@pytest.mark.parametrize("seed", range(20))
def test_whoever_pages_through_gets_every_line_once_and_in_order(logs: Logs, seed: int) -> None:
    """Also while it is written: a reader in between misses nothing and hears nothing twice."""
    chance = random.Random(seed)
    got: list[Line] = []
    after: dict[Device, int] = {}
    written = 0
    with mock.patch.object(loglines, "LEAST_BYTES", 64):
        for _ in range(60):
            for _ in range(chance.randrange(4)):
                written += 1
                logs.write(
                    chance.choice(DEVICES), f"{written} " + "é" * chance.randrange(20) + chance.choice(["\n", "\r.\n"])
                )
            logs.look()
            if chance.random() < 0.3:
                found = logs.read(Asked(after=after), max_bytes=1)
                got, after = got + list(found.lines), dict(found.after)
        while True:
            found = logs.read(Asked(after=after), max_bytes=1)
            got, after = got + list(found.lines), dict(found.after)
            if not found.is_cut:
                break
    assert sorted(int(line.text.split()[0]) for line in got) == list(range(1, written + 1))
    for device in DEVICES:
        assert (
            b"".join(line.text.encode() + b"\n" for line in got if line.device == device) == logs.path(device).read_bytes()
        )
        assert all(line.end <= after[device] for line in got if line.device == device)
    whole: list[Line] = list(logs.read().lines)
    assert [line.at for line in whole] == sorted(line.at for line in whole)
    looks = [[int(line.text.split()[0]) for line in look] for _, look in groupby(whole, key=lambda line: line.at)]
    assert all(max(one) < min(later) for one, later in pairwise(looks)), "what was written later comes later"


def test_since_words_ranks_and_tail_choose_lines(logs: Logs) -> None:
    for number in range(5):
        for device in DEVICES:
            logs.write(device, f"step {number} of {device}\n")
        logs.look()
    begun = 1_790_000_000.0
    late = logs.read(Asked(since=begun + 3))
    assert [text.split()[1] for text in texts(late.lines)] == ["3"] * 3 + ["4"] * 3
    assert texts(logs.read(Asked(words="step 2"), devices=DEVICES[:2]).lines) == ["step 2 of n0/0", "step 2 of n1/1"]
    last = logs.read(Asked(tail=2))
    assert texts(last.lines) == ["step 4 of n1/1", "step 4 of n2/0"] and last.is_cut
    assert texts(logs.read(Asked(tail=2, words="n0")).lines) == ["step 3 of n0/0", "step 4 of n0/0"]
    logs.write(DEVICES[0], "news\n")
    assert texts(logs.read(Asked(after=last.after)).lines) == ["news"]


def test_a_line_without_an_end_waits_for_it_until_nobody_writes_any_more(logs: Logs) -> None:
    logs.write(DEVICES[0], "whole\nhalf")
    first = logs.read()
    assert texts(first.lines) == ["whole"] and not first.is_cut
    logs.write(DEVICES[0], " and half")
    assert texts(logs.read(Asked(after=first.after)).lines) == []
    assert texts(logs.read(Asked(after=first.after, is_over=True)).lines) == ["half and half"]


def test_a_line_longer_than_an_answer_comes_in_pieces(logs: Logs) -> None:
    logs.write(DEVICES[0], "x" * 150 + "\nend\n")
    with mock.patch.object(loglines, "LEAST_BYTES", 64):
        pieces, after = [], {}
        for _ in range(4):
            found = logs.read(Asked(after=after), max_bytes=1)
            pieces, after = pieces + texts(found.lines), dict(found.after)
    assert "".join(pieces) == "x" * 150 + "end"


def test_times_of_a_log_that_is_turned_over_begin_anew_and_many_get_coarser(logs: Logs) -> None:
    for number in range(9):
        logs.write(DEVICES[0], f"{number}\n")
        logs.look()
    logs.path(DEVICES[0]).write_text("anew\n")
    os.utime(logs.path(DEVICES[0]), (logs.now, logs.now))
    turned_at = logs.now
    logs.look()
    assert [(line.text, line.at) for line in logs.read().lines] == [("anew", turned_at)]
    with mock.patch.object(logtimes, "MAX_NOTES", 8):
        for number in range(40):
            logs.write(DEVICES[0], f"{number}\n")
            logs.look()
    kept = logs.path(DEVICES[0]).with_suffix(".times").stat().st_size // logtimes.NOTE.size
    assert kept <= 8
    found = logs.read().lines
    assert len(found) == 41 and [line.at for line in found] == sorted(line.at for line in found)
    assert found[-1].at == logs.now - 1, "the newest is never thinned away"
    # A host that starts anew goes on where the one before it was.
    logs.times = LogTimes(every_s=0)
    logs.look()
    assert logs.read().lines == found


def test_a_log_that_grows_for_ever_gives_its_oldest_bytes_back_and_what_is_left_keeps_its_place(logs: Logs) -> None:
    device, most = DEVICES[0], 1 << 16
    text = "".join(f"line {number}\n" for number in range(50_000))
    logs.write(device, text)
    bound(logs.path(device), most)
    found = logs.path(device).stat()
    assert found.st_size == len(text) and found.st_blocks * 512 <= most + 8192
    chunk = logfiles._read(logs.folder, device, None, 0, 1 << 20, Veil())
    assert len(text) - most - 4096 <= chunk.begins <= len(text) - most
    assert chunk.text == text[chunk.begins :] and chunk.next_offset == len(text)
    page = logs.read(Asked(after={device: 5}), devices=[device])
    assert texts(page.lines) == text[chunk.begins :].partition("\n")[2].splitlines(), "no part of a line, all that are left"
    logs.write(device, "one more\n")
    assert texts(logs.read(Asked(after=page.after), devices=[device]).lines) == ["one more"]
    assert logfiles._read(logs.folder, device, None, len(text), 1 << 20, Veil()).text == "one more\n"


@pytest.mark.parametrize("times", [float("nan"), 1e300, -1e18, 3e11])
def test_times_that_a_program_wrote_itself_are_times_all_the_same(logs: Logs, times: float) -> None:
    logs.write(DEVICES[0], "one\ntwo\n")
    beside = logs.path(DEVICES[0]).with_suffix(".times")
    beside.write_bytes(logtimes.NOTE.pack(times, 4) + logtimes.NOTE.pack(1e9, 8) + b"odd")
    found = logs.read(Asked(), devices=DEVICES[:1])
    assert texts(found.lines) == ["one", "two"] and [instant(line.at).year for line in found.lines] == [2001, 2001]


def test_what_stands_beside_a_log_is_no_link_and_nothing_to_wait_for(logs: Logs, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(logtimes.NOTE.pack(1e9, 4))
    for device, put in zip(DEVICES, (lambda path: path.symlink_to(elsewhere), os.mkfifo, os.mkdir), strict=True):
        logs.write(device, "one\n")
        put(logs.path(device).with_suffix(".times"))
    assert {line.at for line in logs.read().lines} == {logs.now}


def test_names_that_are_no_devices_are_no_logs(logs: Logs) -> None:
    logs.write(DEVICES[0], "one\n")
    for name in (b"n1-\xc2\xb2.log", b"n1-1234567.log", b"n\xff-0.log", b"n\n-0.log", b"-0.log"):
        Path(os.fsdecode(os.fsencode(logs.folder) + b"/" + name)).write_text("x\n")
    assert logfiles.devices_with_logs(logs.folder) == [f"{DEVICES[0].node}/{DEVICES[0].index}"]
