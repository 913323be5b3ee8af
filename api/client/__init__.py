"""The SDK over the REST API, to call or to await.

job = Client("http://127.0.0.1:8265").run("job.yaml")
for step in job.stream_metrics(): ...
print(job.wait().status)
"""

from api.views import EventView, GapView, JobPage, JobSummary, JobView, NodeView, StepView, SubmittedView

from .aio import AsyncClient
from .calls import LogChunk
from .client import Client
from .errors import ApiError, StillRunning, Unreachable
from .job import AsyncJob, Job
from .streaming import Event

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncJob",
    "Client",
    "Event",
    "EventView",
    "GapView",
    "Job",
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
