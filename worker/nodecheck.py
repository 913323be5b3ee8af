"""Whether a machine is fit to be trained on: its arithmetic, its disk, and one sum with another machine. About a second.

    products   per device, against the same product of whole numbers; accelerators by worker/selftest.py, each on its own
    disk       written, brought to the disk and read again, in the folder that states are kept in
    pair       each sends the other a block over one connection, as ranks do, and both know what has to come

`python -m worker.nodecheck` reads a CheckOrder from stdin and writes what it found; `--meet ADDRESS` is the peer's side,
which writes where it listens and ends after one meeting. It imports no torch of its own, and knows nothing of jobs.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.domain import codec
from orchestrator.domain.admission import Checked

from .child import of_one_thread
from .outcome import Outcome

if TYPE_CHECKING:
    import numpy as np

SIZE, LIMIT, ROUNDS = 256, 127, 3
"""Rows and columns, and the largest number: every partial sum is exact in fp32, in any order (see selftest.py)."""
DISK_BYTES = 4 << 20
PAIR_BYTES = 256 << 10
PAIR_S = 4.0
MEET_S = 20.0
"""How long a peer waits for whoever wants to meet it."""
SELFTEST_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where a peer waits, and the words to say first; they are also what the blocks are made of."""

    peer: str
    address: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """num_devices: of the node, which may be emulated. folder: on the disk to try. meeting: None to skip that, `alone` says
    why."""

    num_devices: int
    folder: str
    meeting: Meeting | None = None
    alone: str = "there is no other node"


def main() -> None:
    if sys.argv[1:2] == ["--meet"]:
        meet(sys.argv[2])
    else:
        print(codec.dumps(check(codec.loads(CheckOrder, sys.stdin.read()))).decode(), flush=True)


def check(order: CheckOrder) -> Checked:
    wrong: list[str] = []
    said: list[str] = []
    untried: list[str] = []
    product_s, tflops = _devices(order.num_devices, wrong, untried, said)
    _disk(Path(order.folder), wrong, said)
    pair_wrong = ""
    if order.meeting is None:
        said.append(f"no sum with a peer, because {order.alone}")
    else:
        pair_wrong = _pair(order.meeting, said)
    return Checked(
        wrong=tuple(wrong),
        untried=tuple(untried),
        pair_wrong=pair_wrong,
        said="; ".join(said),
        product_s=product_s,
        tflops=tflops,
    )


# --- devices --------------------------------------------------------------------------------------------------------------


def _devices(num_devices: int, wrong: list[str], untried: list[str], said: list[str]) -> tuple[float, float]:
    """Seconds of a product on the processor, and the rate of the slowest accelerator; 0.0 for what there is none of."""
    real = min(num_devices, len(list(Path("/dev").glob("nvidia[0-9]*"))))
    if real:
        return 0.0, _accelerators(real, wrong, untried, said)
    seconds = min(_product(seed, wrong) for seed in range(ROUNDS))
    said.append(f"products of matrices are right, {seconds * 1e3:.3g} ms each" if not wrong else "products were tried")
    return seconds, 0.0


def _product(seed: int, wrong: list[str]) -> float:
    """Seconds of this thread's own time: what others do on a busy machine does not count."""
    import numpy as np

    generator = np.random.default_rng(seed)
    a, b = (generator.integers(-LIMIT, LIMIT + 1, (SIZE, SIZE)) for _ in range(2))
    one, other = a.astype(np.float32), b.astype(np.float32)
    began = time.thread_time()
    found = one @ other
    seconds = time.thread_time() - began
    if bad := int((found != a @ b).sum()):
        wrong.append(f"{bad} elements of a product of matrices are wrong")
    return seconds


def _accelerators(count: int, wrong: list[str], untried: list[str], said: list[str]) -> float:
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(_selftest, range(count)))
    lists = {Outcome.WRONG: wrong, Outcome.UNUSABLE: untried, Outcome.BUSY: said}
    for index, (outcome, message, _) in enumerate(answers):
        if outcome in lists:
            lists[outcome].append(f"device {index}: {message}")
    tested = [tflops for outcome, _, tflops in answers if outcome in (Outcome.PASSED, Outcome.WRONG)]
    rate = min(tested, default=0.0)
    said.append(f"{len(tested)} accelerators were tested, the slowest at {rate:.3g} TFLOP/s")
    return rate


def _selftest(index: int) -> tuple[Outcome, str, float]:
    """What came of it, in words too, and the device's rate."""
    command = [sys.executable, "-m", "worker.selftest", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SELFTEST_S, env=of_one_thread(os.environ))
        answer = json.loads(done.stdout)
        return Outcome(answer["outcome"]), str(answer["message"]), float(answer.get("tflops", 0.0))
    except subprocess.TimeoutExpired:
        words = f"its self-test did not end within {SELFTEST_S:g} s; see what keeps that machine or device busy"
        return Outcome.UNUSABLE, words, 0.0
    except (ValueError, KeyError, TypeError):
        return Outcome.WRONG, f"the self-test ended with exit code {done.returncode} and said nothing", 0.0


# --- disk -----------------------------------------------------------------------------------------------------------------


def _disk(folder: Path, wrong: list[str], said: list[str]) -> None:
    data = secrets.token_bytes(DISK_BYTES)
    path = folder / f".check-{secrets.token_hex(8)}"
    began = time.monotonic()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, data)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is read again comes from the disk
            os.lseek(fd, 0, os.SEEK_SET)
            read = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
        finally:
            os.close(fd)
            path.unlink()
    except OSError as error:
        wrong.append(f"its disk cannot be written in {folder}: {error.strerror or error}")
        return
    if read != data:
        wrong.append(f"its disk does not give back what was written in {folder}")
        return
    said.append(f"{DISK_BYTES >> 20} MiB were written and read again in {time.monotonic() - began:.2g} s")


# --- a pair ---------------------------------------------------------------------------------------------------------------


def _pair(meeting: Meeting, said: list[str]) -> str:
    """What went wrong, in words."""
    began = time.monotonic()
    try:
        with socket.create_connection((meeting.address, meeting.port), timeout=PAIR_S) as connection:
            connection.settimeout(PAIR_S)
            connection.sendall(meeting.secret.encode())
            total, expected = _exchange(connection, meeting.secret, mine=0)
    except OSError as error:
        return f"no sum with {meeting.peer} within {PAIR_S:g} s: {error.strerror or error}"
    if total != expected:
        return f"the sum with {meeting.peer} came out wrong"
    said.append(f"a sum of {PAIR_BYTES >> 10} KiB with {meeting.peer} took {(time.monotonic() - began) * 1e3:.3g} ms")
    return ""


def meet(address: str) -> None:
    """The peer's side, once. Whoever does not know the secret is hung up on, and the next one listened to."""
    with socket.create_server((address, 0)) as server:
        secret = secrets.token_hex(16)
        place = Meeting(peer="", address=address, port=server.getsockname()[1], secret=secret)
        print(codec.dumps(place).decode(), flush=True)
        until = time.monotonic() + MEET_S
        while (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(PAIR_S)
                    if hmac.compare_digest(_receive(connection, len(secret)), secret.encode()):
                        _exchange(connection, secret, mine=1)
                        return
            except OSError:
                continue


def _exchange(connection: socket.socket, secret: str, mine: int) -> tuple[int, int]:
    """Checksums of the sum of both blocks: as both computed it, and as it has to be. 0 where they do not agree."""
    blocks = list(_blocks(secret))
    if mine == 0:
        connection.sendall(blocks[0].tobytes())
        theirs = _receive(connection, PAIR_BYTES)
    else:
        theirs = _receive(connection, PAIR_BYTES)
        connection.sendall(blocks[1].tobytes())
    import numpy as np

    total = zlib.crc32((np.frombuffer(theirs, np.float32) + blocks[mine]).tobytes())
    connection.sendall(total.to_bytes(4, "big"))
    other = int.from_bytes(_receive(connection, 4), "big")
    return (total if total == other else 0), zlib.crc32((blocks[0] + blocks[1]).tobytes())


def _blocks(secret: str) -> Iterator[np.ndarray]:
    import numpy as np

    for side in (0, 1):
        yield np.random.default_rng([int(secret, 16), side]).random(PAIR_BYTES // 4, np.float32)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = num_bytes
    while left:
        part = connection.recv(min(left, 1 << 16))
        if not part:
            raise OSError("the other side hung up")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
