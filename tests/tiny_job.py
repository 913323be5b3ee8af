"""A job that trains until it is cancelled, for tests that trouble what is around it: as small as a job can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from api.client import Client
from api.views import IncidentView, JobView

TEXT = "the quick brown fox jumps over the lazy dog\n"


@dataclass(frozen=True, slots=True)
class TinyJob:
    client: Client
    id: str

    @classmethod
    def start(cls, client: Client, folder: Path, within_s: float = 120, **sections: object) -> TinyJob:
        """Returns once it has committed some steps."""
        until_checked(client, within_s)
        text = folder / "tiny-job.txt"
        text.write_text(TEXT * 400)
        body = {
            "name": "tiny",
            "program": "causal_lm",
            "data": {"files": [str(text)]},
            "model": {"layers": 2, "width": 32, "heads": 2, "ffn": 64},
            "train": {"steps": 1_000_000, "micro_batches": 8, "micro_batch_size": 1, "sequence": 32},
            "parallel": {"tp": 1, "pp": 1},
            "checkpoint": {"every": 0},
            **sections,
        }
        job = cls(client, client.submit(body).id)
        job.until(lambda view: view.step >= 5, within_s)
        return job

    def view(self) -> JobView:
        return self.client.job(self.id)

    def pids(self) -> dict[str, int | None]:
        """By device."""
        plan = self.view().plan
        assert plan is not None
        return {seat.device: seat.pid for seat in plan.seats}

    def nodes(self) -> set[str]:
        """Where it trains."""
        return nodes_of(self.view())

    def until(self, is_so: Callable[[JobView], bool], within_s: float = 120) -> JobView:
        deadline = time.monotonic() + within_s
        while not is_so(view := self.view()):
            assert not view.is_over, view.reason
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {view.status}, step {view.step}, {view.reason}"
            time.sleep(0.05)
        return view

    def trains_where(self, is_so: Callable[[set[str]], bool], within_s: float = 120) -> JobView:
        """Until it trains on such nodes and no incident is open, as one view of it says: two could be of two plans."""
        return self.until(lambda view: _is_calm(view) and is_so(nodes_of(view)), within_s)

    def trains_on(self, steps: int = 5, within_s: float = 120) -> JobView:
        """So many more steps are recorded, and it runs."""
        wanted = self.view().step + steps
        return self.until(lambda view: view.status == "RUNNING" and view.step >= wanted, within_s)

    def incidents_since(self, before: JobView) -> tuple[IncidentView, ...]:
        seen = {incident.number for incident in before.incidents}
        return tuple(incident for incident in self.view().incidents if incident.number not in seen)

    def cancel(self) -> None:
        """Its devices are free then."""
        self.client.cancel(self.id)
        self.client.wait(self.id, timeout_s=60)

    def assert_every_step_once(self) -> None:
        steps = [step.step for step in self.client.all_metrics(self.id)]
        assert steps == list(range(1, len(steps) + 1)), "a step is missing or was counted twice"


def until_checked(client: Client, within_s: float = 120) -> None:
    """Every node that is up may be used: a job waits for that for some seconds only, and would begin small and grow."""
    deadline = time.monotonic() + within_s
    while not (nodes := client.nodes()) or any(node.status == "UP" and node.admission != "admitted" for node in nodes):
        assert time.monotonic() < deadline, nodes
        time.sleep(0.05)


def nodes_of(view: JobView) -> set[str]:
    assert view.plan is not None
    return {seat.device.rpartition("/")[0] for seat in view.plan.seats}


def _is_calm(view: JobView) -> bool:
    """Whatever befalls it now is an incident of its own, not another attempt of the last one."""
    return view.status == "RUNNING" and all(incident.pause_s is not None for incident in view.incidents)
