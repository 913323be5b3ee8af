"""How the service's processes log: one JSON object a line on stderr, whoever speaks, with the ids that tie lines together.

    ts level event component; job, generation, step, rank, node, request_id where the speaker said them

What looks like a secret is blotted out here, not where it is logged. `text` is the same for people.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from api.config import LogSection
from api.redaction import redacted

_QUIET = ("uvicorn.access", "httpx", "asyncio")


def configure(settings: LogSection, component: str) -> None:
    """Of this process, once; libraries that use `logging` come out the same way."""
    level = getattr(logging, settings.level.upper())

    def named(_: Any, __: str, event: EventDict) -> EventDict:
        event.setdefault("component", component)
        event.pop("color_message", None)  # uvicorn's, the same again with colours
        return event

    def blotted(_: Any, __: str, event: EventDict) -> EventDict:
        cleaned: EventDict = redacted(event)
        return cleaned

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", key="ts"),
        named,
    ]
    last: list[Processor] = [structlog.processors.format_exc_info, blotted]
    render: Processor = (
        structlog.processors.JSONRenderer(default=str)
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=False, timestamp_key="ts")
    )
    structlog.configure(
        processors=[*shared, *last, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), structlog.stdlib.PositionalArgumentsFormatter()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
