"""How often a job was suspected of a hang and had none: a gauge of the server's, read as Prometheus would read it."""

from __future__ import annotations

import urllib.request
from urllib.request import Request

from prometheus_client.parser import text_string_to_metric_families

from api.client.credentials import headers_for

from .cluster import NotMeasured

FALSE_ALARMS = "everstep_job_false_alarms"


def false_alarms(url: str, job: str) -> int:
    """Of the running job's life. Raises NotMeasured."""
    # A proxy of the environment must not see requests to this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(Request(f"{url}/metrics", headers=headers_for(url)), timeout=10) as answer:
            found = gauge(answer.read().decode(), FALSE_ALARMS, job)
    except OSError as error:
        raise NotMeasured(f"{url}/metrics does not answer within 10 s: {error}") from error
    if found is None:
        raise NotMeasured(f"{FALSE_ALARMS} has no value for job {job}; it is kept for jobs that are not over")
    return found


def gauge(text: str, name: str, job: str) -> int | None:
    """None where there is no such job in it."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("job") == job:
                return int(sample.value)
    return None
