"""Devices that may compute wrongly: kept out of every job's plans until a self-test, or an operator, says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import Device, Generation, JobId


class Standing(StrEnum):
    TESTING = "testing"
    """Kept out; a self-test is to tell."""
    HELD = "held"
    """Kept out until an operator releases it."""
    RELEASED = "released"
    """In use again; the strike is remembered for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """What is held against a device. since: wall clock of the last strike; job, generation: whose ranks gave the evidence.

    tester: the job whose host has been asked for the self-test; None until there is one. said: what the test found.
    """

    device: Device
    reason: str
    since: float
    job: JobId
    generation: Generation = Generation(0)
    strikes: int = 1
    standing: Standing = Standing.TESTING
    tester: JobId | None = None
    said: str = ""

    @property
    def is_out(self) -> bool:
        return self.standing is not Standing.RELEASED
