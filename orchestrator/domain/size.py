"""How many devices a job may and should have, as its owner last said; it may change while the job runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """In devices. max_devices, target: 0 for no limit: then the job takes what it can use."""

    min_devices: int = 1
    max_devices: int = 0
    target: int = 0

    @staticmethod
    def of(spec: JobSpec) -> Size:
        """As the job was submitted."""
        return Size(min_devices=spec.parallel.min_devices, max_devices=spec.parallel.max_devices)

    @property
    def limit(self) -> int:
        """No more devices than this; 0 for no limit."""
        return min((most for most in (self.max_devices, self.target) if most), default=0)

    def within(self, spec: JobSpec) -> JobSpec:
        """The spec that a plan of this size is chosen by."""
        asked = spec.parallel
        if (asked.min_devices, asked.max_devices) == (self.min_devices, self.limit):
            return spec  # as submitted, which most are: this is asked many times in a kernel step
        return replace(spec, parallel=replace(asked, min_devices=self.min_devices, max_devices=self.limit))
