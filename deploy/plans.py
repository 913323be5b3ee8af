"""A job's plan on a cluster that need not be there, in a process of its own: {"job", "cluster"} as JSON on stdin.

For programs to read: {"result": ...} on stdout, or {"refused": "..."} and exit status 1. It needs neither a server nor
a store.
"""

from __future__ import annotations

import asyncio
import json
import sys

from api.plan_files import PlanRequest
from api.plan_views import ForecastView, forecast
from api.schemas import read
from orchestrator.adapters.plan_thread import ThreadForeseer
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.domain.errors import EverstepError, Refused


def main() -> int:
    try:
        found = asyncio.run(_forecast(read(PlanRequest, json.load(sys.stdin))))
    except EverstepError as error:
        print(json.dumps({"refused": str(error)}))
        return 1
    print(json.dumps({"result": found.model_dump(mode="json")}))
    return 0


async def _forecast(asked: PlanRequest) -> ForecastView:
    if asked.cluster is None:
        raise Refused("no cluster was given; name a file of one, or ask the server for a plan on its own nodes")
    foreseer = ThreadForeseer(SubprocessProber())
    return forecast(await foreseer.foresee(asked.job.to_spec(), asked.cluster.to_sketch()))


if __name__ == "__main__":
    sys.exit(main())
