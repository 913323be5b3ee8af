"""Job ids. New ones: a prefix and a ULID in lower case, so that ids sort by the time they were made."""

from __future__ import annotations

import re
import secrets

from orchestrator.domain.ids import JobId

OWN_IDS = "job- and then 1..59 lower-case letters, digits and dashes"
_OWN = re.compile(r"job-[a-z0-9][a-z0-9-]{0,58}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_job_id(now: float) -> JobId:
    """`job-` and 26 characters: 48 bits of milliseconds, 80 random bits. Safe in file, actor and key names."""
    number = (int(now * 1000) & (2**48 - 1)) << 80 | secrets.randbits(80)
    return JobId("job-" + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -5, -5)))


def is_own_id(text: str) -> bool:
    """Whether somebody may choose it for a job."""
    return _OWN.fullmatch(text) is not None
