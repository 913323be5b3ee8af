"""The SDK: one synchronous client over the REST API. `Client("http://127.0.0.1:8265").submit("job.yaml")`."""

from api.views import EventView, GapView, JobPage, JobSummary, JobView, NodeView, StepView, SubmittedView

from .client import Client, Event, LogChunk
from .errors import ApiError, StillRunning, Unreachable

__all__ = [
    "ApiError",
    "Client",
    "Event",
    "EventView",
    "GapView",
    "JobPage",
    "JobSummary",
    "JobView",
    "LogChunk",
    "NodeView",
    "StepView",
    "StillRunning",
    "SubmittedView",
    "Unreachable",
]
