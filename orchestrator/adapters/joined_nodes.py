"""Nodes on other machines, each brought by an `everstep join` there: the control plane's end.

It owns nothing of theirs and starts none; it leaves words for them (mailbox.py) and waits for theirs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from orchestrator.domain import codec
from orchestrator.domain.admission import Checked
from orchestrator.domain.errors import NotFound, Unavailable
from orchestrator.domain.ids import NodeId
from worker.nodecheck import CheckOrder, Meeting

from .checking import CHECK_S, PeerUnavailable
from .local_nodes import LocalNodes
from .mailbox import CHECK, END, HERE, AskedCheck, Mailbox

LOOK_S = 0.25


class JoinedNodes:
    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    async def knows(self, node: NodeId) -> bool:
        return await asyncio.to_thread(self._mailbox.get, HERE, node) is not None

    async def kill(self, node: NodeId) -> None:
        await asyncio.to_thread(self._mailbox.put, END, node)

    async def check_with(self, node: NodeId, meeting: Meeting | None, alone: str) -> Checked:
        """Raises Unavailable where nothing is said in time."""
        # The machine fills in how many devices it has, and where its disk is.
        order = CheckOrder(num_devices=0, folder="", meeting=meeting, alone=alone)
        asked = AskedCheck(id=secrets.token_hex(8), order=order)
        await asyncio.to_thread(self._mailbox.put, CHECK, node, codec.dumps(asked))
        until = asyncio.get_running_loop().time() + CHECK_S
        while asyncio.get_running_loop().time() < until:
            answer = await asyncio.to_thread(self._mailbox.answered_check, node)
            if answer is not None and answer.id == asked.id:
                return answer.found
            await asyncio.sleep(LOOK_S)
        raise Unavailable(f"{node} did not answer a check within {CHECK_S:g} s; see what `everstep join` says there")


class Providers:
    """ports.NodeProvider: nodes of this machine and those that joined. Only the former can be added from here."""

    def __init__(self, local: LocalNodes, joined: JoinedNodes) -> None:
        self._local = local
        self._joined = joined

    async def add(self, kind: str, num_devices: int, labels: Mapping[str, str] | None = None) -> NodeId:
        return await self._local.add(kind, num_devices, labels)

    async def kill(self, node: NodeId) -> None:
        if not self._local.knows(node) and await self._joined.knows(node):
            await self._joined.kill(node)
        else:
            await self._local.kill(node)

    async def check(self, node: NodeId, peer: NodeId | None) -> Checked:
        if peer is None:
            return await self._check(node, None, "there is no other node")
        try:
            async with self._local.peer(peer) as meeting:
                return await self._check(node, meeting, "")
        except PeerUnavailable as error:
            return await self._check(node, None, str(error))

    async def _check(self, node: NodeId, meeting: Meeting | None, alone: str) -> Checked:
        if not self._local.knows(node) and await self._joined.knows(node):
            return await self._joined.check_with(node, meeting, alone)
        try:
            return await self._local.check_with(node, meeting, alone)
        except NotFound as error:
            raise NotFound(f"{error}; nor did it join by `everstep join`") from error
