"""Calls about webhooks, as values; see calls.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal
from urllib.parse import quote

from api.hook_shapes import DeliveryView, MadeWebhookView, WebhookView

from .calls import Call, many, one

PATH = "/api/v1/webhooks"


def create(
    name: str, url: str, events: Sequence[str], projects: Sequence[str], labels: Mapping[str, str] | None
) -> Call[MadeWebhookView]:
    asked = {"events": list(events), "projects": list(projects), "labels": dict(labels or {})}
    body = {"name": name, "url": url, **asked}
    return Call(method="POST", path=PATH, read=one(MadeWebhookView), body=body, is_repeatable=False)


def webhooks() -> Call[list[WebhookView]]:
    return Call(method="GET", path=PATH, read=many(WebhookView))


def webhook(id: str) -> Call[WebhookView]:
    return Call(method="GET", path=_path(id), read=one(WebhookView))


def remove(id: str) -> Call[None]:
    return Call(method="DELETE", path=_path(id), read=lambda _: None, is_repeatable=False)


def verb(id: str, name: Literal["pause", "resume"]) -> Call[WebhookView]:
    return Call(method="POST", path=f"{_path(id)}:{name}", read=one(WebhookView))


def test(id: str) -> Call[DeliveryView]:
    return Call(method="POST", path=f"{_path(id)}:test", read=one(DeliveryView), is_repeatable=False)


def deliveries(id: str) -> Call[list[DeliveryView]]:
    return Call(method="GET", path=f"{_path(id)}/deliveries", read=many(DeliveryView))


def redeliver(id: str, delivery: str) -> Call[DeliveryView]:
    path = f"{_path(id)}/deliveries/{quote(delivery, safe='')}:redeliver"
    return Call(method="POST", path=path, read=one(DeliveryView))


def _path(id: str) -> str:
    return f"{PATH}/{quote(id, safe='')}"
