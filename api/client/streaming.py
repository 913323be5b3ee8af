"""What an event stream tells, and how long it may say nothing: shared by both clients."""

from __future__ import annotations

from typing import TypeAlias

from api.views import EventView, GapView, StepView

Event: TypeAlias = EventView | StepView | GapView
SILENCE_S = 45.0
"""An event stream that says nothing for this long, pings included, is broken."""
SHAPES: dict[str, type[EventView] | type[StepView] | type[GapView]] = {
    "history": EventView,
    "step": StepView,
    "gap": GapView,
}
