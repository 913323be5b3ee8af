"""The text of a token: how one is made, told from other text, and turned into the only thing that is kept of it.

    evst_<64 hex digits: 256 random bits><8 hex digits: their CRC-32>

The prefix is for scanners of leaked secrets, the checksum tells a token from a typo without asking anybody. Needs nothing
but the standard library, because clients and servers both read it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import zlib

PREFIX = "evst_"
PATTERN = re.compile(r"evst_[0-9a-f]{72}")
"""For scanners."""
FILE = "admin.token"
"""In a state folder: the token of whoever may read that folder."""


def mint() -> str:
    body = secrets.token_hex(32)
    return f"{PREFIX}{body}{_checksum(body)}"


def is_whole(text: str) -> bool:
    """Whether it could have been minted: neither cut short nor mistyped."""
    return PATTERN.fullmatch(text) is not None and _checksum(text[len(PREFIX) : -8]) == text[-8:]


def digest(text: str) -> str:
    """What is kept of a token or of a session; 256 random bits need no slow hash."""
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
