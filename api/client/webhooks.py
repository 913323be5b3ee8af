"""For whoever is told: whether a message is from this service, and what it says.

event = webhooks.received(request.headers, request.body, secret)
if event.type == "job.failed": ...
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from orchestrator.notify.signing import TOLERANCE_S, BadSignature, verify

__all__ = ["BadSignature", "WebhookEvent", "received"]


class WebhookEvent(BaseModel):
    """id: the same for a message that comes twice, which happens; whoever acts on it should look."""

    id: str
    type: str
    timestamp: datetime
    data: dict[str, Any]


def received(
    headers: Mapping[str, str], body: bytes, secret: str, *, now: float | None = None, tolerance_s: float = TOLERANCE_S
) -> WebhookEvent:
    """body: as it came, byte for byte. now: seconds since the epoch. Raises BadSignature."""
    id = verify(secret, headers, body, time.time() if now is None else now, tolerance_s)
    return WebhookEvent.model_validate({**json.loads(body), "id": id})
