"""The sender of webhooks on the wire: the address that was looked at, the certificate of the name, and nothing else."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from orchestrator.adapters.hook_sender import PinnedSender
from orchestrator.notify.addresses import Address, Reach
from tests.heard import Receiver, receiving

pytestmark = pytest.mark.timeout(60)
REACH = Reach(http=True, networks=(ip_network("127.0.0.0/8"),))
NAME = "hooks.example"


class Names:
    """A resolver that a test plays, and what it was asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append(host)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [ip_address(one) for one in answer]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of NAME, with its key, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run([*made, *files], check=True, capture_output=True)
    return folder


def test_a_name_is_resolved_once_and_its_certificate_checked_at_the_address_it_had(certificate: Path) -> None:
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))

    async def whole() -> None:
        async with receiving(serving) as told:
            names = Names(["127.0.0.1"], ["169.254.169.254"])
            sender = PinnedSender(REACH, resolver=names, tls=trusting)
            sent = await sender.send(f"https://{NAME}:{told.port}/told?a=b", {"X-One": "1"}, b"{}")
            assert (sent.code, sent.error, names.asked) == (204, "", [NAME]), "a second look would have led elsewhere"
            (message,) = told.messages
            assert message.line == "POST /told?a=b HTTP/1.1" and message.body == b"{}"
            assert message.headers["host"] == f"{NAME}:{told.port}" and message.headers["x-one"] == "1"
            again = await sender.send(f"https://{NAME}:{told.port}/told", {}, b"{}")
            assert again.code is None and "169.254.169.254, which is no public address" in again.error
            wrong = PinnedSender(REACH, resolver=Names(["127.0.0.1"]), tls=trusting)
            other = await wrong.send(f"https://other.example:{told.port}/", {}, b"{}")
            assert other.code is None and "certificate" in other.error
            untrusting = PinnedSender(REACH, resolver=Names(["127.0.0.1"]))
            assert "certificate" in (await untrusting.send(f"https://{NAME}:{told.port}/", {}, b"{}")).error
            assert len(told.messages) == 1

    asyncio.run(whole())


def with_receiver(test: Callable[[Receiver], object]) -> None:
    async def whole() -> None:
        async with receiving() as told:
            await test(told)  # type: ignore[misc]

    asyncio.run(whole())


def test_a_name_with_a_public_and_a_private_address_is_refused_whole() -> None:
    async def check(told: Receiver) -> None:
        for answer in (["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["::ffff:10.0.0.1"], ["0.0.0.0"]):
            sent = await PinnedSender(REACH, resolver=Names(answer)).send("https://x.example/", {}, b"")
            assert sent.code is None and "no public address" in sent.error

    with_receiver(check)


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.0.0.1", "localhost"])
def test_other_ways_to_write_an_address_are_what_they_resolve_to(host: str) -> None:
    async def check(told: Receiver) -> None:
        sent = await PinnedSender(Reach(http=True)).send(f"http://{host}:{told.port}/", {}, b"")
        assert sent.code is None and ("no public address" in sent.error or "cannot be resolved" in sent.error)
        assert told.messages == []

    with_receiver(check)


def test_redirects_are_not_followed_and_the_environments_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(told: Receiver) -> None:
        async with receiving() as proxy:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            told.answers.append(302)
            sent = await PinnedSender(REACH).send(told.url, {}, b"{}")
            assert (sent.code, len(told.messages), proxy.messages) == (302, 1, []) and "not followed" in sent.error

    with_receiver(check)


def test_a_receiver_that_does_not_answer_or_is_not_there_is_given_up_in_time() -> None:
    async def check(told: Receiver) -> None:
        told.gate.clear()
        sent = await PinnedSender(REACH, timeout_s=0.3).send(told.url, {}, b"{}")
        assert sent.code is None and "no answer within 0.3 s" in sent.error
        closed = PinnedSender(REACH, resolver=Names(["127.0.0.2", "127.0.0.1"]))
        told.gate.set()
        assert (await closed.send(f"http://x.example:{told.port}/", {}, b"{}")).code == 204, "the next of its addresses"

    with_receiver(check)


def test_what_is_answered_beyond_its_status_is_not_read() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 Fine\r\nContent-Length: 1000000000000\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            writer.close()

    async def whole() -> None:
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            assert (await PinnedSender(REACH).send(f"http://127.0.0.1:{port}/", {}, b"{}")).code == 200

    asyncio.run(whole())
