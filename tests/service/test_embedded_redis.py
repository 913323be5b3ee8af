"""The private redis-server: where it listens, what it keeps, and how it says what is wrong."""

from __future__ import annotations

import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestrator.adapters.embedded_redis import EmbeddedRedis, bundled_server, server_version
from orchestrator.adapters.processes import marked, wait_for_end
from orchestrator.domain.errors import Conflict, Unavailable

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["path", "bundled"])
def embedded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    binary = shutil.which("redis-server") if request.param == "path" else bundled_server()
    if binary is None:
        pytest.skip(f"no redis-server of kind {request.param} here")
    server = EmbeddedRedis(tmp_path, binary)
    yield server
    server.stop()


def client(server: EmbeddedRedis, password: str | None = None) -> redis.Redis:
    address, once = server.address, Retry(NoBackoff(), 0)
    return redis.Redis(
        host=address.host, port=address.port, password=password or address.password, socket_timeout=30, retry=once
    )


def test_killed_server_keeps_its_address_and_every_acknowledged_write(embedded: EmbeddedRedis) -> None:
    first = embedded.start()
    with client(embedded) as before:
        for number in range(200):
            before.incr("count")
            before.rpush("list", number)
    process = embedded.process
    assert process is not None
    process.send(signal.SIGKILL)
    assert wait_for_end([process], 30)
    assert embedded.process is None
    assert embedded.start() == first
    with client(embedded) as after:
        assert after.get("count") == b"200"
        assert after.llen("list") == 200


def test_it_is_private(embedded: EmbeddedRedis, tmp_path: Path) -> None:
    address = embedded.start()
    with pytest.raises(redis.AuthenticationError), client(embedded, "guessed") as guessing:
        guessing.ping()
    assert address.password is not None and len(address.password) >= 64
    for path in (tmp_path / "redis" / "password", tmp_path / "redis" / "redis.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    process = embedded.process
    assert process is not None
    server = psutil.Process(process.pid)
    assert not any(address.password in argument for argument in server.cmdline()), "everybody can read that"
    listening = [one.laddr.ip for one in server.net_connections() if one.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]


def test_starting_twice_at_once_is_one_server(embedded: EmbeddedRedis, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        addresses = list(pool.map(lambda _: EmbeddedRedis(tmp_path, embedded._binary).start(), range(4)))
    assert len(set(addresses)) == 1
    running = [
        process
        for process in psutil.process_iter(["cmdline", "cwd", "name"])
        if process.info["name"].startswith("redis-server") and process.info["cwd"] == str(tmp_path / "redis")
    ]
    assert len(running) == 1


def test_stop_ends_it_and_may_be_repeated(embedded: EmbeddedRedis) -> None:
    embedded.start()
    process = embedded.process
    embedded.stop()
    embedded.stop()
    assert process is not None and not process.is_alive
    with pytest.raises(redis.ConnectionError), client(embedded) as late:
        late.ping()


def test_it_is_found_by_the_mark_in_its_environment(embedded: EmbeddedRedis, tmp_path: Path) -> None:
    embedded.start({"PATH": "/usr/bin:/bin", "A_MARK": str(tmp_path)})
    assert marked({"A_MARK": str(tmp_path)}) == (embedded.process,)


def test_taken_port_is_said_in_words(embedded: EmbeddedRedis, tmp_path: Path) -> None:
    embedded.start()
    embedded.stop()
    with socket.create_server(("127.0.0.1", embedded.address.port)), pytest.raises(Conflict, match="taken by another"):
        embedded.start()


def test_server_that_cannot_start_is_said_in_words(embedded: EmbeddedRedis, tmp_path: Path) -> None:
    embedded.start()
    embedded.stop()
    files = [path for path in (tmp_path / "redis").rglob("*.aof*") if path.is_file()]
    for path in files:
        path.write_bytes(b"*3\r\n$3\r\nSET\r\n$garbage\r\n" * 3)
    assert files, "it writes an append-only file"
    with pytest.raises(Unavailable, match="ended at once"):
        embedded.start()


def test_older_server_is_kept_from_newer_data(tmp_path: Path) -> None:
    newer, older = shutil.which("redis-server"), bundled_server()
    if newer is None or older is None or server_version(newer).split(".")[0] <= server_version(older).split(".")[0]:
        pytest.skip("needs two servers of different major versions")
    server = EmbeddedRedis(tmp_path, newer)
    server.start()
    server.stop()
    with pytest.raises(Conflict, match="install redis-server"):
        EmbeddedRedis(tmp_path, older).start()


def test_address_before_the_first_start_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="start it first"):
        _ = EmbeddedRedis(tmp_path).address
