"""Words between the control plane and the machines that joined it, left in the GCS, which both sides reach with one token.

    leaving/NODE   by the machine: it is to be emptied, then told to end
    end/NODE       by the control plane: nothing is on it any more
    check/NODE     by the control plane: an id, and what to try; checked/NODE has that id and what was found
    here/NODE      by the machine, for as long as it is one

Calls block and ask a GCS that may be away: they are for threads. What words lead to is their readers' business. Whether a
name is free is asked there too, of Ray's own table of nodes.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.domain import codec
from orchestrator.domain.admission import Checked
from orchestrator.domain.errors import Unavailable
from orchestrator.domain.ids import NodeId
from worker.nodecheck import CheckOrder

NAMESPACE = b"everstep-nodes"
LEAVING, END, CHECK, CHECKED, HERE = "leaving", "end", "check", "checked", "here"
_ALIVE = 0
"""A node's state in Ray's table."""
ANSWER_S = 2.0
"""For a node whose port is tried; one that says nothing in that time may still be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCheck:
    id: str
    order: CheckOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCheck:
    id: str
    found: Checked


@dataclass(slots=True)
class Mailbox:
    """address: of the GCS. Ray's variables must be set before the first call. Every method raises Unavailable."""

    address: str
    _client: Any = field(default=None)

    def put(self, word: str, node: NodeId, data: bytes = b"1") -> None:
        self._ask("internal_kv_put", _key(word, node), data, True, NAMESPACE)

    def get(self, word: str, node: NodeId) -> bytes | None:
        found: bytes | None = self._ask("internal_kv_get", _key(word, node), NAMESPACE)
        return found

    def delete(self, word: str, node: NodeId) -> None:
        self._ask("internal_kv_del", _key(word, node), False, NAMESPACE)

    def asked_check(self, node: NodeId) -> AskedCheck | None:
        data = self.get(CHECK, node)
        return codec.loads(AskedCheck, data) if data else None

    def answered_check(self, node: NodeId) -> AnsweredCheck | None:
        data = self.get(CHECKED, node)
        return codec.loads(AnsweredCheck, data) if data else None

    def places_of(self, node: NodeId) -> tuple[str, ...]:
        """HOST:PORT of every node of this name, but for those whose machine says that nobody listens there.

        Ray calls a node alive for minutes after it died (decision 0012), so its word alone is not enough.
        """
        rows = self._ask("get_all_node_info").values()
        named = [
            (row.node_manager_address, row.node_manager_port) for row in rows if not row.state and row.node_name == node
        ]
        return tuple(f"{host}:{port}" for host, port in sorted(named) if not _is_gone(host, port))

    def _ask(self, name: str, *arguments: object) -> Any:
        try:
            if self._client is None:
                from ray._raylet import GcsClient  # type: ignore[attr-defined]

                self._client = GcsClient(address=self.address)
            return getattr(self._client, name)(*arguments)
        except Exception as error:  # Ray has no class for what it raises here
            self._client = None
            raise Unavailable(f"the control plane at {self.address} does not answer: {error}") from error


def _is_gone(host: str, port: int) -> bool:
    with suppress(OSError):  # silence is no evidence
        try:
            socket.create_connection((host, port), timeout=ANSWER_S).close()
        except ConnectionRefusedError:
            return True
    return False


def leaving_nodes() -> frozenset[NodeId]:
    """Those that want to go, for a process that is a driver of Ray's."""
    from ray.experimental.internal_kv import _internal_kv_list

    keys: list[bytes] = _internal_kv_list(f"{LEAVING}/".encode(), namespace=NAMESPACE)
    return frozenset(NodeId(key.decode().partition("/")[2]) for key in keys)


def _key(word: str, node: NodeId) -> bytes:
    return f"{word}/{node}".encode()
