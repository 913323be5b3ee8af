"""Webhooks: make, list, test, pause and remove them; what was sent, and sending it once more."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Path, Request, Response

from orchestrator.domain.access import Principal
from orchestrator.domain.hooks import Attempt, Delivery, Hook, Standing
from orchestrator.notify import choosing, retrying, signing
from orchestrator.notify.addresses import Reach, target_of
from orchestrator.notify.ports import HookSecrets, HookStore

from .. import hook_shapes as shapes
from ..access import ThePrincipal
from ..deps import body_of, document
from ..problems import Problem, not_found

router = APIRouter(prefix="/api/v1/webhooks", tags=["webhooks"])
WebhookBody = Annotated[shapes.WebhookRequest, Depends(body_of(shapes.WebhookRequest))]
TheDeliveryId = Annotated[str, Path(max_length=100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhooks:
    """What these routes need: hooks, their secrets, and where messages may go."""

    store: HookStore
    secrets: HookSecrets
    reach: Reach


def get_webhooks(request: Request) -> Webhooks:
    found: Webhooks | None = request.app.state.webhooks
    if found is None:
        raise Problem(409, "webhooks-off", "this server sends no webhooks; set webhooks.enabled in its configuration")
    return found


TheWebhooks = Annotated[Webhooks, Depends(get_webhooks)]


async def get_hook(
    webhooks: TheWebhooks, principal: ThePrincipal, webhook_id: Annotated[str, Path(max_length=100)]
) -> tuple[Hook, Standing]:
    """Another project's is answered in the very words of one that never was."""
    hook, standing = await webhooks.store.hook(webhook_id)
    if not _is_visible(hook, principal):
        raise not_found(f"there is no webhook {webhook_id}; list the webhooks to see what there is")
    return hook, standing


TheHook = Annotated[tuple[Hook, Standing], Depends(get_hook)]


@router.post("", status_code=201, openapi_extra=document(shapes.WebhookRequest))
async def create_webhook(
    response: Response, webhooks: TheWebhooks, principal: ThePrincipal, wanted: WebhookBody
) -> shapes.MadeWebhookView:
    """Have a URL told of what happens from now on. The secret that its messages are signed with is in this answer only."""
    target_of(wanted.url, webhooks.reach)
    projects = wanted.projects or principal.projects
    if not all(principal.reaches(project) for project in projects):
        allowed = ", ".join(principal.projects)
        raise Problem(403, "forbidden", f"this token makes webhooks of {allowed}; name those, or none for all of them")
    if principal.projects and any(one.is_of_cluster for one in wanted.events):
        raise Problem(403, "forbidden", "events of nodes are about the whole cluster; use a token for all projects")
    hook = Hook(
        id=f"wh-{secrets.token_hex(8)}",
        name=wanted.name,
        url=wanted.url,
        created_at=time.time(),
        created_by=principal.name,
        occasions=wanted.events,
        projects=projects,
        labels=wanted.labels,
    )
    secret = signing.secret_of(secrets.token_bytes(signing.SECRET_BYTES))
    # First: a hook without one could tell nobody anything.
    await anyio.to_thread.run_sync(webhooks.secrets.put, hook.id, secret)
    try:
        await webhooks.store.add(hook)
    except Exception:
        await anyio.to_thread.run_sync(webhooks.secrets.remove, hook.id)
        raise
    response.headers["Cache-Control"] = "no-store"
    response.headers["Location"] = f"/api/v1/webhooks/{hook.id}"
    return shapes.MadeWebhookView(secret=secret, **dict(_shown(hook, Standing())))


@router.get("")
async def list_webhooks(webhooks: TheWebhooks, principal: ThePrincipal) -> list[shapes.WebhookView]:
    """Oldest first, without their secrets."""
    return [_shown(*one) for one in await webhooks.store.hooks() if _is_visible(one[0], principal)]


@router.get("/{webhook_id}")
async def get_webhook(found: TheHook) -> shapes.WebhookView:
    return _shown(*found)


@router.delete("/{webhook_id}", status_code=204)
async def delete_webhook(webhooks: TheWebhooks, found: TheHook) -> Response:
    """With its secret and its deliveries, those that wait included."""
    await webhooks.store.remove(found[0].id)
    await anyio.to_thread.run_sync(webhooks.secrets.remove, found[0].id)
    return Response(status_code=204)


@router.post("/{webhook_id}:pause")
async def pause_webhook(webhooks: TheWebhooks, principal: ThePrincipal, found: TheHook) -> shapes.WebhookView:
    """Have it told nothing: what is pending waits, and what happens meanwhile is not told later either."""
    await webhooks.store.pause(found[0].id, f"by {principal.name}", time.time())
    return _shown(*await webhooks.store.hook(found[0].id))


@router.post("/{webhook_id}:resume")
async def resume_webhook(webhooks: TheWebhooks, found: TheHook) -> shapes.WebhookView:
    """Have a paused one told again, at first what was pending."""
    await webhooks.store.resume(found[0].id, time.time())
    return _shown(*await webhooks.store.hook(found[0].id))


@router.post("/{webhook_id}:test", status_code=202)
async def test_webhook(webhooks: TheWebhooks, found: TheHook) -> shapes.DeliveryView:
    """Send it a ping, also where it is paused; its deliveries tell what came of it."""
    made = choosing.ping(found[0], secrets.token_hex(8), time.time())
    await webhooks.store.put(made)
    return _delivery(made)


@router.get("/{webhook_id}/deliveries")
async def list_deliveries(webhooks: TheWebhooks, found: TheHook) -> list[shapes.DeliveryView]:
    """Newest first; the newest five hundred are kept."""
    return [_delivery(one) for one in await webhooks.store.deliveries(found[0].id)]


@router.post("/{webhook_id}/deliveries/{delivery_id}:redeliver", status_code=202)
async def redeliver(webhooks: TheWebhooks, found: TheHook, delivery_id: TheDeliveryId) -> shapes.DeliveryView:
    """Send it once more, under the same id, as often as it takes."""
    again = retrying.again(await webhooks.store.delivery(found[0].id, delivery_id), time.time())
    await webhooks.store.put(again)
    return _delivery(again)


def _is_visible(hook: Hook, principal: Principal) -> bool:
    return not principal.projects or (bool(hook.projects) and set(hook.projects) <= set(principal.projects))


def _shown(hook: Hook, standing: Standing) -> shapes.WebhookView:
    return shapes.WebhookView(
        id=hook.id,
        name=hook.name,
        url=hook.url,
        events=hook.occasions,
        projects=hook.projects,
        labels=dict(hook.labels),
        created_at=_instant(hook.created_at),
        created_by=hook.created_by,
        status="active" if standing.paused_at is None else "paused",
        why=standing.why,
        paused_at=None if standing.paused_at is None else _instant(standing.paused_at),
        failures=standing.failures,
        last_delivered_at=None if standing.delivered_at is None else _instant(standing.delivered_at),
    )


def _delivery(one: Delivery) -> shapes.DeliveryView:
    return shapes.DeliveryView(
        id=one.id,
        event=one.occasion,
        at=_instant(one.at),
        status=one.fate,
        tries=one.tries,
        next_try_at=None if one.due_at is None else _instant(one.due_at),
        attempts=tuple(_attempt(attempt) for attempt in one.attempts),
        body=one.body,
    )


def _attempt(one: Attempt) -> shapes.AttemptView:
    return shapes.AttemptView(at=_instant(one.at), seconds=one.seconds, code=one.code, error=one.error)


def _instant(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
