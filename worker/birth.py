"""What a rank is born with, and how its process becomes its own: dying with its parent, keeping no foreign descriptor.

It owns the first instructions after the fork. It refuses to know what the process is for.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from orchestrator.domain.requests import OpenHost

from .lifeline import Lifeline
from .parentage import die_with_parent
from .program import Program

_NICE = 5
"""Where ranks compute on the processors that host, supervisor and Redis run on, those must not wait for a time slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a host shares, copy on write."""

    order: OpenHost
    program: Program
    tokens: torch.Tensor
    rehearses: bool = False
    """Who is born to it does a step in miniature before it takes orders, and says then that it stands by."""

    def rehearsing(self) -> Job:
        return replace(self, rehearses=True)


class Inherited(NamedTuple):
    """Descriptors a rank is born with."""

    control: int
    bell: int
    listener: int
    page: int
    log: int
    slot: int
    other_slot: int


def settle_in(inherited: Inherited, parent: int) -> None:
    """Make a forked process a rank's: `parent` is the process that forked it."""
    # The zygote is its job's user already (confinement.py): a change of it here would clear the death signal.
    die_with_parent(parent)
    # Linux shares processors out by session where it groups tasks by itself (autogroup): in their zygote's, all ranks of a
    # node would have the share of one process, and those that wait for each other would be in each other's way.
    os.setsid()
    os.nice(_NICE)
    Lifeline(inherited.page).hold()
    _keep_only(inherited)
    _write_to(inherited.log)


def _keep_only(inherited: Inherited) -> None:
    """Close every descriptor that is not this rank's: a forgotten one would keep a dead peer's connection open."""
    low = 3
    for fd in sorted(inherited):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def _write_to(log: int) -> None:
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # every thread's stack, into the log, also while the main thread hangs
