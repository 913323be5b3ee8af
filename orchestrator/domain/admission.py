"""Whether a node may be used: what checking it came to, and what is held against it as a whole.

What is held against one of its devices, because of wrong numbers, is quarantine.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check of a node found. Parts that could not be tried because jobs use them are named in `said`."""

    wrong: tuple[str, ...] = ()
    """Of the node by itself, in words."""
    untried: tuple[str, ...] = ()
    """Devices that could not be used at all, in words: nothing shows that they are broken, yet no job could use them."""
    pair_wrong: str = ""
    """Between it and its peer: either may be the reason, or what lies between them."""
    said: str = ""
    """What was tried and how fast it was, in words."""
    product_s: float = 0.0
    """A product of matrices on its slowest device; 0.0 where nobody measured."""
    tflops: float = 0.0
    """The same as a rate, on accelerators; 0.0 on a processor, whose kind may be pretended."""


class Admittance(StrEnum):
    CHECKING = "checking"
    """Nothing new is placed there until its check has come back."""
    ADMITTED = "admitted"
    REFUSED = "refused"
    """Jobs leave it where they can; it is checked again after a while, or when an operator releases it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """since: wall clock of when it got where it is; why: what for, in words. life: which start of the node this is about.

    number, asked_at: of the newest check that was asked for. peer: who took part in it, None where nobody could. failed:
    peers with which nothing came of it, in this check.
    """

    node: NodeId
    since: float
    standing: Admittance = Admittance.CHECKING
    why: str = ""
    life: str = ""
    was_admitted: bool = False
    number: int = 0
    asked_at: float | None = None
    unanswered: int = 0
    """Checks in a row."""
    peer: NodeId | None = None
    failed: tuple[NodeId, ...] = ()
    suspects: tuple[NodeId, ...] = ()
    """Nodes to which a link is in doubt: to be tried first."""
    said: str = ""
    """What the newest check found."""
    product_s: float = 0.0
    tflops: float = 0.0
    """And how fast it found the slowest accelerator to be; 0.0 where there is none."""
    strikes: int = 0
    struck_at: float = 0.0
    """How often it was refused, and when last; forgotten after a day."""
    is_here: bool = True
    is_lost: bool = False
    ends: tuple[float, ...] = ()
    """When it went away lately."""
