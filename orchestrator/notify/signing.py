"""How a message is signed and a signature checked, as standardwebhooks.com has it, so that its libraries check ours.

    webhook-id: msg-...    webhook-timestamp: seconds since the epoch    webhook-signature: v1,<base64>

What is signed is `<id>.<timestamp>.<body>`, by HMAC-SHA256, with the bytes whose base64 follows `whsec_` in the secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping

PREFIX = "whsec_"
SECRET_BYTES = 32
PATTERN = re.compile(r"whsec_[A-Za-z0-9+/]{43}=")
"""For scanners of leaked secrets."""
TOLERANCE_S = 300.0
ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"


class BadSignature(Exception):
    """The message is not from whoever has the secret, or is an old one that somebody sends again."""


def secret_of(random: bytes) -> str:
    """random: SECRET_BYTES of them."""
    return PREFIX + base64.b64encode(random).decode()


def headers(secret: str, id: str, timestamp: int, body: bytes) -> dict[str, str]:
    return {ID: id, TIMESTAMP: str(timestamp), SIGNATURE: signature(secret, id, timestamp, body)}


def signature(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """Raises ValueError where it is no secret of ours."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a webhook's secret begins with whsec_ and goes on in base64") from None
    made = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(made.digest()).decode()}"


def verify(secret: str, given: Mapping[str, str], body: bytes, now: float, tolerance_s: float = TOLERANCE_S) -> str:
    """The message's id. given: the headers, in whatever case. Raises BadSignature."""
    found = {name.lower(): value for name, value in given.items()}
    id, at, signatures = (found.get(name, "") for name in (ID, TIMESTAMP, SIGNATURE))
    if not id or not signatures or not (at.isascii() and at.isdecimal() and len(at) <= 12):
        raise BadSignature(f"{ID}, {TIMESTAMP} or {SIGNATURE} is missing or no such thing")
    if abs(now - int(at)) > tolerance_s:
        raise BadSignature(f"it was sent {now - int(at):.0f} s ago, which is more than {tolerance_s:g}: see the clocks")
    wanted = signature(secret, id, int(at), body)
    # Several stand there while a secret is replaced.
    if not any(hmac.compare_digest(one.encode(), wanted.encode()) for one in signatures.split(" ")):
        raise BadSignature("none of its signatures is of this secret")
    return id
