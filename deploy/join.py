"""One machine of somebody else's cluster: `python -m deploy.join ADDRESS --token-file F [--kind H100] [--devices 8]`.

It brings a node there and stays for as long as that is one. SIGTERM: the node is emptied first, then this ends; a second
one ends it at once. Killed, it takes its node along: whoever sees it go ends the rest. A control plane that goes away is
waited for, and a node that ended by itself is brought again.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.adapters import ray_environment
from orchestrator.adapters.local_nodes import LABEL, LocalNodes, NodeSpec
from orchestrator.adapters.mailbox import CHECK, CHECKED, END, HERE, LEAVING, AnsweredCheck, Mailbox
from orchestrator.adapters.processes import write_private
from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError, Refused, Unavailable
from orchestrator.domain.ids import NodeId

TOKEN_VARIABLE = "EVERSTEP_JOIN_TOKEN"
USAGE = 2
LOOK_S = 0.5
AGAIN_S, MAX_AGAIN_S = 1.0, 30.0
"""Before a node that ended by itself is brought again, doubled each time."""
FORGET_S = 5.0
"""For the control plane to hear that it has left; it sees that anyway."""
LEAVE_S = 600.0
"""How long a node may take to be emptied."""
ENDING_S = 15.0
"""How long the guard of one that was killed may take to end its node, before the next one may start."""


def main() -> int:
    asked = _parser().parse_args()
    state_dir = asked.state_dir.expanduser().resolve()
    if asked.guard:
        sys.stdin.read()  # until whoever holds the other end has ended
        LocalNodes(state_dir).stop()
        return 0
    if LABEL.fullmatch(asked.name) is None:
        print(f"--name {asked.name!r} must be 1..63 letters, digits, dots, dashes or underscores", file=sys.stderr)
        return USAGE
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    node = NodeId(asked.name)
    labels = {name: value for name, value in (("rack", asked.rack), ("switch", asked.switch)) if value}
    own = asked.node_address or _own_address(asked.address)
    spec = NodeSpec(asked.kind, asked.devices, labels, own, name=node)
    try:
        with _alone(state_dir, ENDING_S) as held:
            nodes = LocalNodes(state_dir)
            if nodes.registry().head:
                raise Refused(f"{state_dir} is a cluster's own; give this machine's node another --state-dir")
            nodes.stop()  # what an earlier one left behind
            _take_token(nodes, asked.token_file)
            return Member(nodes, asked.address, spec, node, state_dir, asked.leave_s).run(held)
    except EverstepError as error:
        print(error, file=sys.stderr)
        return 1


class Member:
    """The node for as long as it is one."""

    def __init__(
        self, nodes: LocalNodes, address: str, spec: NodeSpec, node: NodeId, state_dir: Path, leave_s: float
    ) -> None:
        self._nodes = nodes
        self._address = address
        self._spec = spec
        self._node = node
        self._state_dir = state_dir
        self._leave_s = leave_s
        self._mailbox = Mailbox(address)
        self._signals = 0
        self._leaving_since: float | None = None
        self._has_told = False
        self._answered = ""
        self._again_s = AGAIN_S
        self._has_name = False
        """Nobody else is this node; what was left for it is ours to take away."""

    def run(self, held: int) -> int:
        """Until it has left. held: the lock on the state directory, a file. Raises EverstepError where it never got in."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)
        self._require_name()
        command = [sys.executable, "-m", "deploy.join", "--guard", "--state-dir", str(self._state_dir), self._address]
        # With the lock: whoever comes after a killed one starts no node that its guard would still end.
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[held])
        try:
            for word in (LEAVING, END, CHECK, CHECKED):
                self._mailbox.delete(word, self._node)
            self._mailbox.put(HERE, self._node)
            self._nodes.join(self._address, self._spec)
            self._require_name(own=1)  # another may have come at the same time
            what = f"{self._spec.num_devices} {self._spec.kind} at {self._spec.address}"
            _say(f"{self._node} joined {self._address} with {what}")
            # On a thread, because a control plane that is gone is waited for inside Ray, where no signal is heard.
            staying = threading.Thread(target=self._stay, daemon=True)
            staying.start()
            while staying.is_alive() and not self._must_go:
                staying.join(LOOK_S)
        finally:
            guard.communicate()  # closes its stdin: it ends every process of the node, and is waited for
            if self._has_name:
                forgetting = threading.Thread(target=self._forget, daemon=True)
                forgetting.start()
                forgetting.join(FORGET_S)
        _say(f"{self._node} has left")
        return 0

    def _require_name(self, own: int = 0) -> None:
        """own: nodes of this name that this machine has there. Raises Refused where there are others."""
        places = self._mailbox.places_of(self._node)
        self._has_name = len(places) <= own
        if not self._has_name:
            raise Refused(
                f"{self._address} has a node {self._node} already, at {' and '.join(places)}; give this machine another"
                " --name, or stop that one first"
            )

    def _forget(self) -> None:
        mailbox = Mailbox(self._address)
        try:
            for word in (HERE, LEAVING, END):
                mailbox.delete(word, self._node)
        except Unavailable as error:
            _say(str(error))

    @property
    def _must_go(self) -> bool:
        """It was told twice, or is not emptied in time."""
        since = self._leaving_since
        return self._signals > 1 or (since is not None and time.monotonic() > since + self._leave_s)

    def _stay(self) -> None:
        while self._stays():
            time.sleep(LOOK_S)

    def _told(self, *_: object) -> None:
        self._signals += 1

    def _stays(self) -> bool:
        if self._must_go:
            return False
        try:
            if self._signals and self._leaving_since is None:
                self._leaving_since = time.monotonic()
                _say(f"{self._node} is being emptied, for at most {self._leave_s:g} s; once more to leave at once")
            if self._leaving_since is not None and not self._has_told:
                self._mailbox.put(LEAVING, self._node)
                self._has_told = True
            if self._mailbox.get(END, self._node) is not None:
                return False
            self._check_where_asked()
        except Unavailable as error:
            _say(f"{error}; waiting for it")
        except (EverstepError, OSError, ValueError) as error:
            _say(f"a check was not made: {error}")  # the control plane hears nothing, and judges that; jobs train on
        if self._nodes.is_alive(self._node) is False:
            self._again()
        else:
            self._again_s = AGAIN_S
        return True

    def _again(self) -> None:
        _say(f"{self._node} has ended by itself; it is brought again in {self._again_s:g} s")
        time.sleep(self._again_s)
        self._again_s = min(MAX_AGAIN_S, 2 * self._again_s)
        if self._must_go:
            return  # its guard has ended what there was, and would not see another
        try:
            self._nodes.kill_now(self._node)
            self._require_name()
            self._nodes.join(self._address, self._spec)
        except (EverstepError, OSError) as error:
            _say(str(error))

    def _check_where_asked(self) -> None:
        asked = self._mailbox.asked_check(self._node)
        if asked is None or asked.id == self._answered:
            return
        self._answered = asked.id
        found = asyncio.run(self._nodes.check_with(self._node, asked.order.meeting, asked.order.alone))
        self._mailbox.put(CHECKED, self._node, codec.dumps(AnsweredCheck(id=asked.id, found=found)))


@contextmanager
def _alone(state_dir: Path, wait_s: float) -> Iterator[int]:
    """The state directory is this process's, and that of whoever is given the file. Raises Refused."""
    until = time.monotonic() + wait_s
    with (state_dir / "join.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Refused(
                        f"another everstep join has its node in {state_dir}; stop it, or give this one another --state-dir"
                    ) from None
                time.sleep(LOOK_S)
        yield file.fileno()


def _take_token(nodes: LocalNodes, file: Path | None) -> None:
    """The other cluster's, from a file or the environment, where nothing that is started here finds it. Raises Refused."""
    try:
        token = file.read_text() if file is not None else os.environ.pop(TOKEN_VARIABLE, "")
    except OSError as error:
        raise Refused(f"the token cannot be read from {file}: {error.strerror}") from error
    if not token.strip():
        raise Refused("joining needs the cluster's token; copy ray/token of its state directory, give it by --token-file")
    environment = nodes.environment
    environment.token_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(environment.token_file, token.strip())
    ray_environment.prepare(environment)
    environment.apply()


def _own_address(address: str) -> str:
    """This machine's, towards the control plane. Raises Refused."""
    host, _, port = address.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise Refused(f"{address} is not reached from here ({error}); give HOST:PORT of the control plane's Ray") from error


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep join", description="Bring this machine to a cluster as a node.")
    parser.add_argument("address", help="HOST:PORT of the control plane's Ray; `everstep up --address` says it")
    parser.add_argument("--token-file", type=Path, help=f"the cluster's token; else the variable {TOKEN_VARIABLE}")
    parser.add_argument("--kind", default="cpu", help="of its devices: A100, H100, H200, B200, cpu, ...")
    parser.add_argument("--devices", type=int, default=1, help="how many there are")
    parser.add_argument("--name", default=socket.gethostname().lower(), help="what the node is called there")
    parser.add_argument("--node-address", default="", help="where it listens and is reached; else found out")
    parser.add_argument("--rack", default="", help="its failure domain; mirrors keep out of their owner's")
    parser.add_argument("--switch", default="", help="its failure domain where no rack is given")
    parser.add_argument("--leave-s", type=float, default=LEAVE_S, help="how long being emptied may take")
    parser.add_argument("--state-dir", type=Path, default=Path("~/.everstep-node"), help="of this machine alone")
    parser.add_argument("--guard", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread may still wait for a control plane that is gone
