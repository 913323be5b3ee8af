"""A job made larger and smaller, and nodes emptied and taken away below it, while faults befall it: a script of changes.

Each is asked for once the one before has come true, as the job's own view says. It owns the script and what was seen of
it; faults, and giving back what they took, are the schedule's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from api.client import Client
from api.views import JobView, PlanView

from .cluster import NotMeasured, say

DRAIN = 0
"""In a script, in place of a number of devices: another node comes, and one that the job is on is emptied and goes."""
DRAINS = 0.25
"""Their share of what is drawn."""
COMES_TRUE_S = 240.0
"""Devices may have to be checked, released or given back first."""
STEPS = 2
"""Between what has come true and what is asked for next."""
POLL_S = 0.1


def draw(random: Random, sizes: Sequence[int], number: int) -> tuple[int, ...]:
    """A script of so many changes; no size is asked for twice in a row. sizes: at least two."""
    script: list[int] = []
    before = max(sizes)
    for _ in range(number):
        if random.random() < DRAINS:
            script.append(DRAIN)
        else:
            before = random.choice([size for size in sizes if size != before])
            script.append(before)
    return tuple(script)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """What was seen. changes: what came true of the script. recuts: how often stages were seen to hold other layers than
    in the plan before.
    """

    changes: int
    recuts: int


class Resizes:
    """One run of a script, on a thread of its own. job: its id."""

    def __init__(self, client: Client, job: str, script: Sequence[int]) -> None:
        self._client = client
        self._job = job
        self._script = script
        self._must_end = False
        self._cuts: frozenset[tuple[int, int]] | None = None
        self._recuts = 0

    def end(self) -> None:
        self._must_end = True

    def run(self) -> Resized:
        """Raises NotMeasured where a change does not come true, or the job is over before."""
        done = 0
        for wanted in self._script:
            asked = f"a node less for {self._job}" if wanted == DRAIN else f"{wanted} devices for {self._job}"
            say(f"asked for: {asked}")
            is_so = self._drained() if wanted == DRAIN else self._resized(wanted)
            if not self._wait(is_so, asked):
                break
            done += 1
        return Resized(changes=done, recuts=self._recuts)

    def _resized(self, wanted: int) -> Callable[[JobView], bool]:
        self._client.resize(self._job, target=wanted)
        return lambda view: view.plan is not None and len(view.plan.seats) == wanted

    def _drained(self) -> Callable[[JobView], bool]:
        view = self._client.job(self._job)
        nodes = {node.id: node for node in self._client.nodes()}
        on = sorted(_nodes(view.plan) & set(nodes))
        if not on:
            return lambda _: True  # a fault has taken them all just now
        leaving = nodes[on[0]]
        self._client.add_node(leaving.kind, leaving.num_devices)
        self._client.remove_node(leaving.id)

        def is_off(view: JobView) -> bool:
            living = {node.id for node in self._client.nodes() if node.status != "LOST"}
            return leaving.id not in living | _nodes(view.plan)

        return is_off

    def _wait(self, is_so: Callable[[JobView], bool], what: str) -> bool:
        """Until it is, and some steps have been made with it. False where it must end before. Raises NotMeasured."""
        deadline, until = time.monotonic() + COMES_TRUE_S, None
        while not self._must_end:
            view = self._client.job(self._job)
            if view.is_over or time.monotonic() > deadline:
                raise NotMeasured(f"{what}: it did not come true; the job is {view.status}: {view.reason}")
            self._look(view.plan)
            if until is None and view.status == "RUNNING" and is_so(view):
                until = view.step + STEPS
            if until is not None and view.step >= until:
                return True
            time.sleep(POLL_S)
        return False

    def _look(self, plan: PlanView | None) -> None:
        if plan is None:
            return
        cuts = frozenset(seat.layers for seat in plan.seats)
        self._recuts += self._cuts is not None and cuts != self._cuts
        self._cuts = cuts


def _nodes(plan: PlanView | None) -> set[str]:
    return {seat.device.rpartition("/")[0] for seat in plan.seats} if plan else set()
