"""A machine that has joined stays one, whatever becomes of a check, and brings nothing back once it has to go."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from deploy import join
from deploy.join import Member
from orchestrator.adapters.local_nodes import LocalNodes, NodeSpec
from orchestrator.adapters.mailbox import AskedCheck, Mailbox
from orchestrator.domain.admission import Checked
from orchestrator.domain.codec import Undecodable
from orchestrator.domain.errors import NotFound, Unavailable
from orchestrator.domain.ids import NodeId
from worker.nodecheck import CheckOrder, Meeting

NODE = NodeId("machine")


@dataclass
class Words:
    """Of the control plane's: a check to make, or what asking for one comes to."""

    asks: AskedCheck | Exception

    def get(self, word: str, node: NodeId) -> None:
        return None

    def asked_check(self, node: NodeId) -> AskedCheck:
        if isinstance(self.asks, Exception):
            raise self.asks
        return self.asks


@dataclass
class Nodes:
    fails: Exception = field(default_factory=lambda: NotFound("there is no node machine"))
    is_up: bool = True
    joined: int = 0

    def is_alive(self, node: NodeId) -> bool:
        return self.is_up

    async def check_with(self, node: NodeId, meeting: Meeting | None, alone: str) -> Checked:
        raise self.fails

    def kill_now(self, node: NodeId) -> None: ...

    def join(self, address: str, spec: NodeSpec) -> None:
        self.joined += 1


def member(nodes: Nodes, words: Words, state_dir: Path) -> Member:
    made = Member(cast(LocalNodes, nodes), "127.0.0.1:1", NodeSpec("cpu", 1), NODE, state_dir, leave_s=60.0)
    made._mailbox = cast(Mailbox, words)
    return made


ASKED = AskedCheck(id="1", order=CheckOrder(num_devices=0, folder="", meeting=None, alone="nobody"))


@pytest.mark.parametrize(
    ("asks", "fails"),
    [
        (ASKED, NotFound("there is no node machine")),
        (ASKED, Unavailable("a node's check did not end")),
        (ASKED, OSError("no process can be started")),
        (Undecodable("of another version"), NotFound("")),
    ],
)
def test_a_check_that_fails_here_does_not_take_the_node_away(
    asks: AskedCheck | Exception, fails: Exception, tmp_path: Path
) -> None:
    assert member(Nodes(fails=fails), Words(asks), tmp_path)._stays()


def test_a_node_that_ended_is_brought_again_but_not_where_it_has_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(is_up=False)
    made = member(nodes, Words(Unavailable("nothing is asked")), tmp_path)
    monkeypatch.setattr(join.time, "sleep", lambda _: None)
    assert made._stays() and nodes.joined == 1

    def told_twice(_: float) -> None:
        made._told()
        made._told()

    monkeypatch.setattr(join.time, "sleep", told_twice)
    made._stays()
    assert nodes.joined == 1 and not made._stays()
