"""Which revision of a job somebody has looked at, so that what they ask for on the strength of it can be refused when it is
not so any more.

A job's revision is a count, kept by the store: one more for each command about it, and for each commit after which its
mark is another one. Steps, losses and checkpoints move it nowhere: who decides how large a job should be, or whether to
pause it, does not decide anew with every step. While a command waits for the supervisor, readers are told the revision
before it: what they see is not what will be, so nothing may rest on it.
"""

from __future__ import annotations

from .job import JobRecord
from .status import status_of


def mark_of(record: JobRecord) -> str:
    """What a person decides on, in one line: two records with the same mark look alike to whoever asks for a change."""
    size = record.wanted_size
    wanted = f"{size.min_devices}-{size.max_devices}@{size.target}"
    return f"{status_of(record.state).value} g{record.generation} {wanted} p{record.priority}"
