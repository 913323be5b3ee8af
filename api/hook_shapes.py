"""What is asked and answered about webhooks. Shared by the routes and the SDK."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from orchestrator.domain.hooks import Fate, Occasion

from .schemas import Labels, Name, Request
from .views import Instant, View


def _no_ping(value: tuple[Occasion, ...]) -> tuple[Occasion, ...]:
    if Occasion.PING in value:
        raise ValueError("must not name ping, which only a test sends")
    return tuple(dict.fromkeys(value))


class WebhookRequest(Request):
    """Whom to tell of what. Of events, projects and labels, none means any."""

    name: Name
    url: Annotated[str, Field(min_length=1, max_length=2000)]
    """https://...; no user name or password in it, and no private address unless the configuration lists its network."""
    events: Annotated[tuple[Occasion, ...], Field(max_length=50), AfterValidator(_no_ping)] = ()
    projects: Annotated[tuple[Name, ...], Field(max_length=100)] = ()
    """Only of jobs of these. A token that is limited to projects makes webhooks of those."""
    labels: Labels = {}
    """Only of jobs that carry all of these."""

    @model_validator(mode="after")
    def _tells_something(self) -> WebhookRequest:
        named = [one.value for one in self.events if one.is_of_cluster]
        if named and (self.projects or self.labels):
            raise ValueError(f"{', '.join(named)} is about the whole cluster; leave out projects and labels, or that event")
        return self


class AttemptView(View):
    """code: the HTTP status that was answered; null where none was. error: why it did not count, "" where it did."""

    at: Instant
    seconds: float
    code: int | None
    error: str


class DeliveryView(View):
    """One message to one webhook. id: as its header webhook-id has it; the same where it is sent again."""

    id: str
    event: Occasion
    at: Instant
    status: Fate
    tries: int
    """Since it was last asked for."""
    next_try_at: Instant | None
    attempts: tuple[AttemptView, ...]
    """The newest twenty, oldest first."""
    body: str


class WebhookView(View):
    """status: active or paused; why: what paused it. failures: deliveries in a row that were given up."""

    id: str
    name: str
    url: str
    events: tuple[Occasion, ...]
    projects: tuple[str, ...]
    labels: dict[str, str]
    created_at: Instant
    created_by: str
    status: str
    why: str
    paused_at: Instant | None
    failures: int
    last_delivered_at: Instant | None


class MadeWebhookView(WebhookView):
    """The only answer that ever holds a webhook's secret."""

    secret: str
