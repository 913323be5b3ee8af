"""One job on thousands of machines for weeks: the same kernel.step, in a world where what is the same for all is implied.

    arrival of a fault ──> HostLost | RankExited | Cordon ──> kernel.step ──> effects ──> what hosts would answer

Between faults nothing is simulated: steps, heartbeats and checkpoints of a job that trains undisturbed follow from its
step time, and the kernel is told of the newest ones when next it is told anything. While it may have to judge how fast
devices are, it is told of every step. A machine is one device: its accelerators are lost together, and a job is planned,
mirrored and moved by machines. `dense` delivers every step by itself, on small clusters, and must come to the same
decisions. It owns virtual time of one job; which faults arrive (arrivals.py) and what the figures mean (whatif.py) it
refuses to know.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import (
    CallHost,
    ChoosePlan,
    CommitCheckpoint,
    Effect,
    NoteCheckpoint,
    ProbeProgram,
    PruneCheckpoints,
)
from orchestrator.domain.events import (
    Contact,
    CordonRequested,
    DeadlinePassed,
    EffectDone,
    HostLost,
    HostSaid,
    Input,
    JobSubmitted,
    NodesSeen,
    PlanChosen,
    ProgramProbed,
    UncordonRequested,
)
from orchestrator.domain.ids import Device, EffectId, Generation, NodeId, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec
from orchestrator.planner.choose import choose
from orchestrator.supervisor.deadlines import deadlines
from orchestrator.supervisor.kernel import State, step

from .answers import Hosts
from .crews import Crews
from .pace import Pace, Tally
from .tempo import Tempo
from .training import JOB, JUDGED, Training

TOLD = frozenset(
    {"rung_taken", "rolled_back", "settled", "growing", "straggler", "straggler_well", "rebalancing", "node_left"}
)
"""Entries of the history that are decisions, or what they rest on."""


class Fleet:
    """nodes: machines the job may have, a device each."""

    def __init__(self, spec: JobSpec, profile: Profile, nodes: Sequence[Node], pace: Pace, *, dense: bool = False) -> None:
        self.now = 0.0
        self.tally = Tally()
        self.nodes: dict[NodeId, Node] = {node.id: node for node in nodes}
        self.pace = pace
        self._profile, self._dense = profile, dense
        self._state = State(root="/shared")
        self._queue: list[tuple[float, int, Callable[[], Sequence[Input]]]] = []
        self._numbers = count()
        self._crews = Crews()
        self._tempo = Tempo(pace.step_s, nodes)
        self._training = Training(self, spec, self._tempo, self._crews, self._why_change, dense=dense)
        self._hosts = Hosts(self, self.nodes, profile, pace, self._training, self._crews, self._kill)
        self._well_at: dict[Device, float] = {}
        self._leaving: dict[NodeId, str] = {}
        """Machines that will be taken away, and why."""
        self._alarms: dict[str, float] = {}
        self._say([NodesSeen(nodes=self._seen()), JobSubmitted(job=JOB, spec=spec, at=0.0)])

    @property
    def record(self) -> JobRecord:
        return self._state.jobs[JOB]

    @property
    def is_judging(self) -> bool:
        tracks = self._state.tracks.get(JOB, {}).values()
        return self.record.rebalance is not None or any(track.odd_since is not None for track in tracks)

    def begin(self) -> None:
        """What is measured begins here."""
        self._training.catch_up()
        self.tally = Tally(began=self._training.said)

    def close(self) -> None:
        """The end of the time that is looked at."""
        self._training.end()
        self.tally.committed = Step(self.record.committed - self.tally.began)

    def run_until(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            at = self._queue[0][0]
            self.now = max(self.now, at)
            inputs: list[Input] = []
            while self._queue and self._queue[0][0] <= at:
                inputs += heapq.heappop(self._queue)[2]()
            if inputs:
                self.step([*self._training.untold(), *inputs])
        self.now = max(self.now, until)

    def after(self, delay_s: float, what: Callable[[], Sequence[Input]]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), what))

    def _say(self, inputs: Sequence[Input]) -> None:
        self.after(0.0, lambda: inputs)

    # --- what befalls it --------------------------------------------------------------------------------------------------

    def lose_node(self, node: NodeId, cause: str, repaired_s: float) -> None:
        """Its processes end with it; the cluster says so a little later, and that it is back once it is mended."""
        if not self._is_up(node):
            return
        device = Device(node, 0)
        self._strike(device, cause)
        self._crews.end(device)
        self._tempo.slow.pop(device, None)
        self._set_status(node, NodeStatus.LOST)
        gone = HostLost(job=JOB, node=node, contact=Contact.GONE, message=cause)
        self.after(self.pace.detect_s, lambda: [gone])
        self.after(self.pace.noticed_s, lambda: [NodesSeen(nodes=self._seen())])
        self.after(repaired_s, lambda: self._repaired(node))

    def take_away(self, node: NodeId, cause: str, notice_s: float, away_s: float) -> None:
        """With notice: an operator has it drained, and lets it be used again when it is back."""
        if node in self._leaving or not self._is_up(node):
            return
        self._leaving[node] = cause

        def go() -> Sequence[Input]:
            self.lose_node(node, cause, away_s)
            return []

        self._say([CordonRequested(node=node, drain=True)])
        self.after(notice_s, go)

    def lose_rank(self, device: Device, cause: str, seen_s: float) -> None:
        """Its process ends, and its machine is well."""
        if not self._crews.lives(device):
            return
        march = self._training.march
        self._strike(device, cause)
        exited = self._crews.kill(device, march.form.generation if march else Generation(0), cause, seen_s)
        self.after(seen_s, lambda: [HostSaid(job=JOB, node=device.node, event=exited)])

    def slow_down(self, device: Device, times: float, lasts_s: float) -> None:
        """It computes for so many times as long, for a while."""
        if not self._is_up(device.node):
            return
        well_at = self._well_at[device] = self.now + lasts_s
        self.expect_change(well_at)

        def mend() -> Sequence[Input]:
            if self._well_at[device] == well_at and device in self._tempo.slow:
                self._training.change_speed(device, 1.0)
            return []

        self.after(lasts_s, mend)
        self._training.change_speed(device, times)

    def expect_change(self, at: float) -> None:
        """A device will compute at another pace from then on."""
        if not self._dense:
            self._training.expect_change(at)

    def _strike(self, device: Device, cause: str) -> None:
        self.tally.faults += 1
        if self._training.has(device):
            self._training.struck(cause)

    def _kill(self, device: Device) -> None:
        self.lose_rank(device, "killed", self.pace.detect_s)

    def _repaired(self, node: NodeId) -> Sequence[Input]:
        self._set_status(node, NodeStatus.UP)
        seen: list[Input] = [NodesSeen(nodes=self._seen())]
        return [*seen, UncordonRequested(node=node)] if self._leaving.pop(node, "") else seen

    def _why_change(self, plan: Plan) -> str:
        if self.record.rebalance is not None:
            return "balance"
        return next((self._leaving[node] for node in plan.nodes if node in self._leaving), "resize")

    def _is_up(self, node: NodeId) -> bool:
        return node in self.nodes and self.nodes[node].status is not NodeStatus.LOST

    def _set_status(self, node: NodeId, status: NodeStatus) -> None:
        self.nodes[node] = replace(self.nodes[node], status=status)

    def _seen(self) -> tuple[Node, ...]:
        return tuple(self.nodes.values())

    # --- the kernel -------------------------------------------------------------------------------------------------------

    def step(self, inputs: Sequence[Input]) -> None:
        stepped = step(self.now, self._state, inputs)
        self._state = stepped.state
        tally = self.tally
        tally.kernel_steps += 1
        for entry in stepped.history:
            if entry.type == "rung_taken":
                tally.rungs[str(entry.data["rung"])] = tally.rungs.get(str(entry.data["rung"]), 0) + 1
            elif entry.type == "rolled_back":
                tally.rolled_back += int(str(entry.data["steps"]))
            elif (forgotten_s := JUDGED.get(entry.type)) and not self._dense:
                self.after(forgotten_s, self._training.watch)
            elif entry.type == "spare_ready":
                self._training.look_again()
            if entry.type in TOLD:
                tally.decisions.append((entry.type, entry.generation, entry.step, _words(entry.type, entry.message)))
        for identity, effect in stepped.effects.items():
            self._carry_out(identity, effect)
        if JOB in self._state.jobs:
            self._set_alarms()

    def _set_alarms(self) -> None:
        wanted = deadlines(self.record)
        self._alarms = {key: at for key, at in self._alarms.items() if key in wanted}
        for key, seconds in wanted.items():
            if key not in self._alarms:
                at = self._alarms[key] = self.now + seconds
                self.after(seconds, lambda key=key, at=at: self._ring(key, at))  # type: ignore[misc]

    def _ring(self, key: str, at: float) -> Sequence[Input]:
        if self._alarms.get(key) != at:
            return []
        del self._alarms[key]
        return [DeadlinePassed(job=JOB, key=key)]

    def _carry_out(self, identity: EffectId, effect: Effect) -> None:
        done = EffectDone(job=JOB, effect=identity)
        match effect:
            case CallHost(node=node, request=request):
                self._hosts.ask(node, request, done)
            case ProbeProgram():
                self._say([ProgramProbed(job=JOB, profile=self._profile), done])
            case ChoosePlan(generation=generation):
                chosen = PlanChosen(job=JOB, generation=generation, result=choose(effect))
                self.after(self.pace.plan_s, lambda: [chosen, done])
            case CommitCheckpoint() | PruneCheckpoints() | NoteCheckpoint():
                self._say([done])


def _words(kind: str, message: str) -> str:
    """What was decided, without what was measured for it and what it was expected to cost."""
    if kind in ("straggler", "straggler_well"):
        return message.split(" takes ")[0]
    if kind == "rebalancing":
        return message.split("as usual: ")[-1].split("; steps of")[0]
    return message.split(" (")[0].split(", expected")[0]
