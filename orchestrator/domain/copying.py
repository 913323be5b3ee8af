"""A copy that lasts: state on its way to a disk, back from one, or from another rank's memory; how far it is, for people.

What nobody waits long for is never told. It decides nothing but how long a generation that moves may take to form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .ids import Device, Step

Copied = Literal["saving", "restoring", "receiving"]
"""saving: a snapshot is being written. restoring: read from a checkpoint. receiving: sent by ranks that hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """One device's part. step: the one whose state it is; bytes are of content; seconds: since it began."""

    device: Device
    what: Copied
    step: Step
    done_bytes: int
    total_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.done_bytes / self.seconds if self.seconds > 0.0 else 0.0
