"""A supervisor's connection to a host: questions are answered, strangers are not, an end is told from silence."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from orchestrator.adapters.host_link import HostLink
from orchestrator.adapters.host_server import HostServer
from orchestrator.adapters.host_wire import BEAT, FRAME, PADDING, Kind, Place
from orchestrator.ports import HostUnreachable

Body = Callable[[HostServer, Place], Awaitable[None]]


def serving(body: Body) -> None:
    async def whole() -> None:
        async def echo(data: bytes) -> bytes:
            return b"echo " + data

        async def slow(data: bytes) -> bytes:
            await asyncio.sleep(0.2)
            return b"slow " + data

        server = HostServer("127.0.0.1", {Kind.HANDLE: echo, Kind.POLL: slow})
        try:
            async with asyncio.timeout(20):
                await body(server, await server.start())
        finally:
            server.close()

    asyncio.run(whole())


def test_answers_find_their_questions_whatever_their_order_and_size() -> None:
    async def body(server: HostServer, place: Place) -> None:
        link = HostLink(place)
        big = bytes(3 << 20)
        answers = await asyncio.gather(
            link.ask(Kind.POLL, b"1"), link.ask(Kind.HANDLE, b"2"), link.ask(Kind.HANDLE, big), link.ask(Kind.POLL, b"4")
        )
        assert answers == [b"slow 1", b"echo 2", b"echo " + big, b"slow 4"]
        assert link.silent_s == 0.0 and not link.gone.done()
        link.close()

    serving(body)


def test_who_does_not_know_the_secret_is_not_answered() -> None:
    async def body(server: HostServer, place: Place) -> None:
        reader, writer = await asyncio.open_connection(place.address, place.port)
        writer.write(b"0" * len(place.secret) + FRAME.pack(1, 1, Kind.HANDLE) + b"x")
        assert await reader.read() == place.greeting.encode()
        writer.close()

    serving(body)


def test_an_answer_that_went_with_its_connection_may_be_asked_for_again() -> None:
    async def body(server: HostServer, place: Place) -> None:
        link = HostLink(place)
        assert await link.ask(Kind.HANDLE, b"1") == b"echo 1"
        asked = asyncio.ensure_future(link.ask(Kind.POLL, b"2"))
        await asyncio.sleep(0.05)
        server.hang_up()
        with pytest.raises(HostUnreachable, match="lost with the connection"):
            await asked
        assert await link.ask(Kind.POLL, b"2") == b"slow 2" and not link.gone.done()
        link.close()

    serving(body)


def test_its_end_and_another_in_its_place_are_told_as_such() -> None:
    async def body(server: HostServer, place: Place) -> None:
        stranger = HostLink(replace(place, greeting="f" * len(place.greeting)))
        assert "another one listens there" in await stranger.gone
        link = HostLink(place)
        await link.ask(Kind.HANDLE, b"1")
        asked = asyncio.ensure_future(link.ask(Kind.POLL, b"2"))
        await asyncio.sleep(0.05)
        server.close()
        assert "nobody listens there" in await link.gone and not asked.done()
        asked.cancel()

    serving(body)


def test_what_does_not_answer_is_silent_and_not_gone() -> None:
    async def whole() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
            place = Place(address="127.0.0.1", port=deaf.getsockname()[1], greeting="g" * 32, secret="s" * 32, pid=1)
            link = HostLink(place)
            await asyncio.sleep(1.3)
            assert link.silent_s > 1.0 and not link.gone.done()
            link.close()

    asyncio.run(whole())


def test_a_question_that_comes_in_pieces_between_beats_is_answered_at_once() -> None:
    async def body(server: HostServer, place: Place) -> None:
        reader, writer = await asyncio.open_connection(place.address, place.port)
        assert await reader.readexactly(len(place.greeting)) == place.greeting.encode()
        writer.write(place.secret.encode() + BEAT * 10)
        await asyncio.sleep(0.05)
        question = FRAME.pack(40, 7, Kind.HANDLE) + b"x" * 40 + PADDING
        for byte in range(0, len(question), 3):  # whatever is cut off where, all that counts has been read in the end
            writer.write(question[byte : byte + 3])
            await writer.drain()
            await asyncio.sleep(0)
        length, number, kind = FRAME.unpack(await reader.readexactly(FRAME.size))
        assert (await reader.readexactly(length), number, kind) == (b"echo " + b"x" * 40, 7, Kind.ANSWER)
        writer.close()

    serving(body)
