"""What a port says of the process behind it: there, gone for certain, or silent."""

from __future__ import annotations

import asyncio
import socket

from orchestrator.adapters.reach import Contact, Reach


async def becomes(reach: Reach, wanted: Contact) -> None:
    async with asyncio.timeout(60):
        while reach.contact is not wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_process_that_listens_is_reached_and_gone_when_it_ends() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            reach = Reach("127.0.0.1", server.getsockname()[1])
            await becomes(reach, Contact.REACHED)
            accepted, _ = server.accept()
            accepted.close()
            await asyncio.sleep(0.1)
            assert reach.contact is Contact.REACHED, "a connection that ends says nothing of the process"
        await becomes(reach, Contact.GONE)
        reach.close()

    asyncio.run(test())


def test_a_machine_that_does_not_answer_is_unreachable_and_never_gone() -> None:
    async def test() -> None:
        # Full, so that the kernel drops what else comes, as a machine without power would.
        with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
            port = server.getsockname()[1]
            fillers = [socket.socket() for _ in range(3)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            reach = Reach("127.0.0.1", port)
            await becomes(reach, Contact.UNREACHABLE)
            reach.close()
            for filler in fillers:
                filler.close()

    asyncio.run(test())
