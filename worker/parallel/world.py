"""torch.distributed's process-wide registry, re-formed for every generation without talking to anybody.

For programs that use torch's own collectives or pipelining, which ask it for a group's members. The groups themselves are
made and connected before; they enter through our registered backend with a local store, so this takes milliseconds and no
peer.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from orchestrator.domain.ids import Rank

from .links import Links
from .mesh import WORLD
from .process_group import LinksProcessGroup


def enter_world(
    rank: Rank, world: dist.ProcessGroup, pipeline: dist.ProcessGroup | None, members: tuple[Rank, ...]
) -> None:
    """Register the generation's world and, where there is one, its pipeline group. Replaces whatever was registered."""
    leave_world()
    hook = sys.excepthook
    try:
        dist.init_process_group("links", store=HashStore(), rank=rank, world_size=world.size(), pg_options=Ready(world))
        if pipeline is not None:
            dist.new_group(list(members), backend="links", pg_options=Ready(pipeline), use_local_synchronization=True)
    finally:
        # init_process_group wraps the hook each time; after some hundred generations a traceback would recurse.
        sys.excepthook = hook


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def warm_up_world() -> None:
    """Do once, in a process that ranks are forked from, what the first generation of each would else pay for.

    Entering the registry empties caches that importing torch has filled, and the first look-up of an address imports a
    codec: together some 70 ms of a new rank's first generation.
    """
    socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)
    links = Links(Rank(0))
    world = LinksProcessGroup(links, label="warm", channel=WORLD, members=(Rank(0),), index=0)
    enter_world(Rank(0), world, None, ())
    leave_world()
    links.close()


@dataclass(frozen=True, slots=True)
class Ready:
    """The options through which a process group of ours enters c10d: the group itself, made and connected before."""

    group: dist.ProcessGroup


def _enter(options: Any, ready: Ready | None) -> dist.ProcessGroup:
    if not isinstance(ready, Ready):
        raise ValueError("backend 'links' has no rendezvous of its own; pass pg_options=Ready(group), as Session.open does")
    return ready.group


dist.Backend.register_backend("links", _enter, extended_api=True, devices=["cpu"])
