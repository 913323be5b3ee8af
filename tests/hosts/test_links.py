"""What a job lives through when machines and the links between them fail, on machines and links that do.

In the order of the file, on one cluster and one job that never ends. Run with -s to see what was measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from api.views import JobView
from deploy.keeper import SUPERVISOR
from deploy.local import status
from orchestrator.adapters.processes import end, identify
from orchestrator.adapters.ray_node import GCS, HEAD
from tests.tiny_job import TinyJob

from .machines import Machines
from .rig import ROOT

pytestmark = pytest.mark.timeout(400)
JOB = {"train": {"steps": 1_000_000, "micro_batches": 8, "micro_batch_size": 1, "sequence": 32, "emulated_layer_s": 0.02}}
"""Its steps are mostly naps, as on machines of their own: eight busy ranks on this one would be late for everything."""


def test_a_second_without_a_link_costs_no_step_and_no_process(machines: Machines, job: TinyJob) -> None:
    before, pids = job.view(), job.pids()
    machines.cut(2)
    time.sleep(1)
    machines.join(2)
    job.trains_on(10)
    assert job.pids() == pids, "every rank lives on"
    assert all(incident.rolled_back == 0 for incident in job.incidents_since(before))


def test_ray_head_is_lost_and_jobs_train_on_with_the_same_processes(machines: Machines, job: TinyJob) -> None:
    before, pids = job.view(), job.pids()
    had = {name: one for name, pid in _processes(machines).items() if (one := identify(pid))}
    end([had[GCS], had[HEAD]], grace_s=0)
    job.trains_on(10)
    # A supervisor whose raylet has ended makes way for one that has the new head's: only that can have hosts placed.
    job.until(lambda _: all(_processes(machines)[name] not in (0, had[name].pid) for name in (GCS, HEAD, SUPERVISOR)))
    job.trains_on(10)
    assert job.pids() == pids and not job.incidents_since(before)
    job.until(lambda _: len(machines.living()) == 4)


def _processes(machines: Machines) -> dict[str, int]:
    """Pids of the control plane by name, 0 where there is none just now."""
    processes = status(machines.cluster.state_dir)["processes"]
    assert isinstance(processes, dict)
    return {name: pid or 0 for name, pid in processes.items()}


def test_a_host_and_then_the_supervisor_have_no_link_for_a_minute_and_healthy_ranks_never_know(
    machines: Machines, job: TinyJob
) -> None:
    """The host is lost to the others first, which go on without it. Its link is back last, and it is used again."""
    machines.all_train()
    alone = Outage.of(machines, sorted(job.nodes())[-1])
    before, pids = job.view(), job.pids()
    machines.cut(ROOT)
    machines.until_status(sorted(job.nodes())[0], "UNREACHABLE")
    during = job.view()
    assert during.status == "RUNNING" and "contact with" in during.reason
    time.sleep(60)
    machines.join(ROOT)
    began = time.monotonic()
    # They trained meanwhile: what comes at once is what was committed in that minute.
    after = job.until(lambda view: view.step >= during.step + 30, within_s=60)
    print(f"\n{after.step - during.step} steps of the minute recorded {time.monotonic() - began:.1f} s after it")
    assert job.pids() == pids and not job.incidents_since(before)
    for node in job.nodes():
        machines.until_status(node, "UP")
    alone.last(60)


def test_a_host_without_a_link_for_ten_seconds_is_used_again(machines: Machines, job: TinyJob) -> None:
    machines.all_train()
    Outage.of(machines, sorted(job.nodes())[-1]).last(10)


def test_host_of_rank_0_is_killed_and_then_the_one_after_it(machines: Machines, job: TinyJob) -> None:
    """No rank and no machine is special; machines in their place are used."""
    machines.all_train()
    before, hosts = job.view(), []
    for _ in range(2):
        plan = job.view().plan
        assert plan is not None
        node = next(seat.device for seat in plan.seats if seat.rank == 0).rpartition("/")[0]
        hosts.append(machines.host_of(node))
        machines.kill(node)
        job.trains_where(lambda nodes: node not in nodes)  # noqa: B023
        job.trains_on(3)
    pauses = [incident.pause_s for incident in job.incidents_since(before)]
    print(f"\npauses: {pauses}")
    for host in hosts:
        machines.start(host)
    machines.all_train()
    assert len(job.nodes()) == 4


def test_a_host_that_no_longer_hears_another_does_not_stop_the_job(machines: Machines, job: TinyJob) -> None:
    """Both hear the supervisor, so nobody is silent: the ranks' connection is what is lost."""
    machines.all_train()
    before, nodes = job.view(), sorted(job.nodes())
    deaf, unheard = machines.host_of(nodes[0]), machines.host_of(nodes[1])
    machines.deafen(deaf, to=unheard)
    job.trains_where(lambda found: not {nodes[0], nodes[1]} <= found, within_s=150)
    job.trains_on(3)
    for incident in job.incidents_since(before):
        print(f"\n{incident.cause}, pause {incident.pause_s} s: {incident.message}")
    machines.heal()
    machines.all_train()


def test_power_is_lost_for_good_and_the_job_goes_on_without_the_machine(machines: Machines, job: TinyJob) -> None:
    """Nothing is ever sent again by it or for it: no reset, no end of file."""
    machines.all_train()
    before = job.view()
    node = sorted(job.nodes())[0]
    machines.cut(machines.host_of(node))
    job.trains_where(lambda nodes: node not in nodes, within_s=90)
    job.trains_on(5)
    (incident,) = job.incidents_since(before)
    print(f"\npower loss: pause {incident.pause_s} s {dict(incident.phases)}")
    assert incident.cause == "node_lost" and incident.rolled_back == 0
    machines.until_status(node, "UNREACHABLE")


# --- hosts that are cut off -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outage:
    """A host whose link is cut, and what ran there. The job has gone on without it."""

    machines: Machines
    node: str
    host: int
    zombies: tuple[int, ...]
    began: float

    @classmethod
    def of(cls, machines: Machines, node: str) -> Outage:
        job, before = machines.job, machines.job.view()
        cut = cls(machines, node, machines.host_of(node), _ranks(before, node), time.monotonic())
        machines.cut(cut.host)
        job.trains_where(lambda nodes: node not in nodes, within_s=90)
        job.trains_on(3)
        (incident,) = job.incidents_since(before)
        print(f"\nlink cut: pause {incident.pause_s} s, {incident.cause}: {incident.message}")
        assert incident.cause == "node_lost"
        return cut

    def last(self, seconds: float) -> None:
        """Until so many seconds after it began; the host is used again after that, with processes of its own."""
        job, node = self.machines.job, self.node
        time.sleep(max(0.0, self.began + seconds - time.monotonic()))
        self.machines.join(self.host)
        back = time.monotonic()
        job.until(lambda _: node in self.machines.living(), within_s=90)
        self.machines.all_train()
        assert node in job.nodes()
        print(f"used again {time.monotonic() - back:.1f} s after the link was back")
        assert not set(self.zombies) & set(job.pids().values()), "its ranks of before had ended"
        assert not [pid for pid in self.zombies if (found := identify(pid)) and found.is_alive]


def _ranks(view: JobView, node: str) -> tuple[int, ...]:
    """Their pids."""
    assert view.plan is not None
    return tuple(seat.pid for seat in view.plan.seats if seat.pid and seat.device.startswith(f"{node}/"))
