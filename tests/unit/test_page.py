"""A progress page tells a host what a rank was doing and what it had seen pass, also after the rank was killed."""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Answer, Disagrees, Evaluation
from orchestrator.domain.ids import Device, Generation, NodeId, Rank, Step
from orchestrator.domain.sight import Traffic
from worker.page.layout import MAX_GROUPS, MAX_IDS, MAX_PEERS, SLOT_BYTES, SLOTS_AT, create_page
from worker.page.reader import PageReader, members_in
from worker.page.writer import PageWriter
from worker.progress import Exchanged, Phase

DEVICE = Device(NodeId("n0"), 1)


def an_answer(step: int, num_ids: int = 4) -> Answer:
    return Answer(step=Step(step), norm=step / 7, losses=tuple(step + number / 3 for number in range(num_ids)))


@pytest.fixture
def page() -> Iterator[tuple[PageWriter, PageReader]]:
    fd = create_page()
    writer, reader = PageWriter(fd), PageReader(fd)
    os.close(fd)
    yield writer, reader
    writer.close()
    reader.close()


def test_a_fresh_page_says_nothing_happened(page: tuple[PageWriter, PageReader]) -> None:
    sight = page[1].look()
    assert (sight.pid, sight.phase, sight.voted, sight.passed, sight.in_wait) == (os.getpid(), Phase.IDLE, 0, 0, False)
    assert page[1].answer() is None


def test_reader_sees_phase_group_and_wait(page: tuple[PageWriter, PageReader]) -> None:
    writer, reader = page
    writer.phase(Phase.COMPUTE, Generation(3), Step(41))
    writer.micro_batch(5)
    writer.enter("pp")
    waiting = reader.look()
    assert (waiting.generation, waiting.phase, waiting.step, waiting.micro_batch) == (3, Phase.COMPUTE, 41, 5)
    assert (waiting.group, waiting.in_wait, waiting.collective) == ("pp", True, 1)
    assert waiting.waiting_since >= waiting.progressed_at > 0
    writer.leave()
    writer.enter("a-much-longer" * 29)
    writer.leave()
    after = reader.look()
    assert (after.in_wait, after.collective) == (False, 2)
    assert after.group == ("a-much-longer" * 29)[:256]
    writer.behind(True)
    assert reader.glance().is_behind
    writer.behind(False)
    assert not reader.glance().is_behind
    writer.behind(True)
    writer.phase(Phase.REDUCE, Generation(3), Step(41))
    assert not reader.glance().is_behind, "whatever raised in between"


def test_a_long_wait_tells_whom_it_is_for_until_it_is_over(page: tuple[PageWriter, PageReader]) -> None:
    writer, reader = page
    writer.phase(Phase.REDUCE, Generation(3), Step(41))
    writer.enter("reduce[0,2,3]")
    assert (reader.look().traffic, reader.glance().told_at) == ({}, 0.0)
    rows = ((2, 7, 7, False, False), (3, 7, 6, True, False), (1, 0, 0, False, True))
    writer.quiet(0.25, [Exchanged(Rank(peer), *rest) for peer, *rest in rows])
    assert reader.look().traffic == {
        3: Traffic(sent=7, received=6, awaits=True),
        1: Traffic(unsent=True),
        2: Traffic(sent=7, received=7),
    }
    glance = reader.glance()
    assert glance.told_at - glance.quiet_since == pytest.approx(0.25) and glance.in_wait
    assert members_in(reader.look().group) == (0, 2, 3)
    writer.leave()
    assert reader.look().traffic == {}
    writer.enter("reduce[0,2,3]")
    assert reader.look().traffic == {}, "the table is of the wait before"


def test_of_more_connections_than_fit_those_waited_for_are_told(page: tuple[PageWriter, PageReader]) -> None:
    writer, reader = page
    writer.enter("x")
    writer.quiet(1.0, [Exchanged(Rank(peer), 1, 1, peer == 900, False) for peer in range(901)])
    found = reader.look().traffic
    assert len(found) == MAX_PEERS and found[Rank(900)].awaits


@pytest.mark.parametrize("label", ["form", "", "tp[]", "tp[0,", "pp[0,x]", "reduce[" + ",".join(map(str, range(99)))])
def test_a_group_without_a_whole_list_of_members_has_none(label: str) -> None:
    assert members_in(label) == ()


@pytest.mark.parametrize("num_ids", [1, 4, MAX_IDS])
def test_answers_come_back_exactly(page: tuple[PageWriter, PageReader], num_ids: int) -> None:
    writer, reader = page
    for step in range(1, 6):
        writer.phase(Phase.VOTE, Generation(2), Step(step))
        writer.passed(an_answer(step, num_ids))
        assert reader.answer() == (2, an_answer(step, num_ids))


@pytest.mark.parametrize("loss", [2.5, 0.0, None])
def test_an_evaluation_comes_back_exactly(page: tuple[PageWriter, PageReader], loss: float | None) -> None:
    answer = replace(an_answer(5), evaluation=Evaluation(step=Step(4), loss=loss))
    page[0].passed(answer)
    assert page[1].answer() == (0, answer)


def test_maxima_of_an_exact_step_come_back_exactly(page: tuple[PageWriter, PageReader]) -> None:
    answer = replace(an_answer(5, MAX_IDS), maxima=tuple(number / 7 for number in range(MAX_GROUPS)))
    page[0].passed(answer)
    assert page[1].answer() == (0, answer)
    with pytest.raises(EverstepError, match="4097 maxima, 4096 fit"):
        page[0].passed(replace(answer, maxima=(*answer.maxima, 0.0)))


def test_more_losses_than_fit_are_refused(page: tuple[PageWriter, PageReader]) -> None:
    with pytest.raises(EverstepError, match="4097 micro-batches, 4096 fit"):
        page[0].passed(an_answer(1, MAX_IDS + 1))


def test_a_writer_that_dies_within_an_answer_leaves_the_one_before(page: tuple[PageWriter, PageReader]) -> None:
    writer, reader = page
    writer.passed(an_answer(1))
    writer.passed(an_answer(2))
    # What a kill in the middle of passed(3) leaves: half a slot, and the word that names slots untouched.
    struct.pack_into("<qqq", writer._memory, SLOTS_AT + (3 & 1) * SLOT_BYTES, 999, 12345, 77)
    answer = reader.answer()
    assert answer is not None
    assert answer[1] == an_answer(2)


def test_concurrent_reader_never_sees_a_mixed_answer(page: tuple[PageWriter, PageReader]) -> None:
    writer, reader = page
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            writer.passed(an_answer(step, 64))

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    try:
        for _ in range(3000):
            if found := reader.answer():
                assert found[1] == an_answer(found[1].step, 64)
                seen += 1
    finally:
        stop.set()
        thread.join()
    assert seen > 100


def test_a_killed_ranks_page_reports_its_vote_only_for_its_own_generation() -> None:
    fd = create_page()
    reader = PageReader(fd)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        rank = PageWriter(fd)
        rank.phase(Phase.VOTE, Generation(4), Step(9))
        rank.voted(Step(8))
        rank.passed(an_answer(8))
        rank.voted(Step(9))
        os.write(tell, b"x")
        signal.pause()
    os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for end in (fd, ready, tell):
        os.close(end)
    mine = reader.report(DEVICE, Generation(4), "killed by SIGKILL")
    assert (mine.voted, mine.answer, mine.held) == (9, an_answer(8), None)
    # The next generation was formed but this rank never voted in it: what it saw pass before is settled already.
    later = reader.report(DEVICE, Generation(5), "killed by SIGKILL")
    assert (later.voted, later.answer) == (0, None)
    reader.close()


def test_what_it_found_wrong_outlives_it_and_is_of_its_own_generation_alone(page: tuple[PageWriter, PageReader]) -> None:
    writer, reader = page
    found = Disagrees(rank=Rank(3), about="state")
    writer.phase(Phase.VOTE, Generation(4), Step(9))
    writer.disagrees(found)
    assert reader.report(DEVICE, Generation(4), "").found == found
    assert reader.report(DEVICE, Generation(5), "").found is None, "there it is settled, and nobody is accused again"


def test_a_page_of_another_version_is_refused() -> None:
    fd = create_page()
    os.pwrite(fd, struct.pack("<q", 99), 8)
    with pytest.raises(EverstepError, match="use one release"):
        PageReader(fd)
    os.close(fd)
