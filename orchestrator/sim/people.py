"""What people ask for while a simulated world is in trouble: other sizes, pauses, cordons, quotas, faults on purpose."""

from __future__ import annotations

from orchestrator.domain.events import (
    Command,
    CordonRequested,
    PauseRequested,
    PriorityRequested,
    QuotaRequested,
    ResizeRequested,
    ResumeRequested,
    UncordonRequested,
)
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.size import Size
from orchestrator.domain.state import TERMINAL

from .world import World

INJECTED = (
    FaultKind.KILL,
    FaultKind.KILL,
    FaultKind.STOP,
    FaultKind.NODE_KILL,
    FaultKind.HOST_KILL,
    FaultKind.ZYGOTE_KILL,
    FaultKind.SLOW_LINK,
    FaultKind.SUPERVISOR_KILL,
    FaultKind.REDIS_STALL,
    FaultKind.CLOCK_JUMP,
)
"""Those from which a job recovers."""


class People:
    """Owners of jobs, and operators."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng

    def resize(self) -> None:
        world, rng = self._world, self._rng
        open_jobs = [job for job, record in sorted(world.records().items()) if not isinstance(record.state, TERMINAL)]
        if not open_jobs:
            return
        job, target = rng.choice(open_jobs), rng.choice((0, 0, 1, 2, 4, 6))
        world.note(f"* {job} is to have {target or 'any number of'} devices")
        world.store.commands.append(ResizeRequested(job=job, size=Size(target=target)))

    def prioritize(self) -> None:
        world, rng = self._world, self._rng
        open_jobs = [job for job, record in sorted(world.records().items()) if not isinstance(record.state, TERMINAL)]
        asked: Command = QuotaRequested(
            project=rng.choice(("default", "other")), max_devices=rng.choice((None, 1, 2, 4, sum(world.scenario.nodes)))
        )
        if open_jobs and rng.random() < 0.7:
            asked = PriorityRequested(job=rng.choice(open_jobs), priority=rng.choice((-1, 0, 1, 5, 9)))
        world.note(f"* somebody: {asked}")
        world.store.commands.append(asked)

    def pause(self) -> None:
        """And resume it some time later."""
        world, rng = self._world, self._rng
        open_jobs = [job for job, record in sorted(world.records().items()) if not isinstance(record.state, TERMINAL)]
        if not open_jobs:
            return
        job, seconds = rng.choice(open_jobs), rng.choice((0.02, 1.0, 8.0))
        world.note(f"* {job} is to pause, for {seconds} s")
        world.store.commands.append(PauseRequested(job=job))
        world.clock.after(seconds, lambda: world.store.commands.append(ResumeRequested(job=job)))

    def cordon(self) -> None:
        world, rng = self._world, self._rng
        alive = [node for node in world.size if node not in world.dead]
        if not alive:
            return
        node = rng.choice(alive)
        asked: Command = CordonRequested(
            node=node,
            drain=rng.random() < 0.7,
            remove=len(alive) > 2 and rng.random() < 0.3,
            deadline_s=rng.choice((None, None, 1.0, 10.0)) if not world.scenario.gentle else None,
        )
        if rng.random() < 0.3:
            asked = UncordonRequested(node=node)
        world.note(f"* an operator: {asked}")
        world.store.commands.append(asked)

    def make_peace(self) -> None:
        """Nothing that anybody asked for is in a job's way any more."""
        commands, world = self._world.store.commands, self._world
        self._vouch()
        commands.extend(UncordonRequested(node=node) for node in world.size)
        commands.extend(QuotaRequested(project=one.name, max_devices=None) for one in world.store.projects)
        commands.extend(ResizeRequested(job=job, size=Size()) for job in sorted(world.records()))
        commands.extend(ResumeRequested(job=job) for job in sorted(world.records()))

    def _vouch(self) -> None:
        """Whatever is kept out, an operator lets back in: a job may need every device there is."""
        if not self._world.is_over:
            self._world.release()
            self._world.clock.after(20.0, self._vouch)

    def inject(self) -> None:
        """Whether it is too much for the mirrors is the kernel's to say."""
        world, rng = self._world, self._rng
        jobs = [job for job, record in sorted(world.records().items()) if not isinstance(record.state, TERMINAL)]
        if not jobs:
            return
        kind = rng.choice(INJECTED)
        fault = FaultRequested(
            fault=kind,
            job=rng.choice(jobs),
            at=rng.choice(("", "", "after_vote", "in_vote", "before_report")) if kind is FaultKind.KILL else "",
            duration_s=rng.choice((0.1, 1.0, 5.0)),
            jump_s=rng.choice((-40.0, 40.0)),
            seed=rng.randrange(1 << 16),
            beyond_mirrors=not world.scenario.gentle and rng.random() < 0.5,
        )
        world.note(f"* injected: {fault.fault} {fault.at} in {fault.job}")
        world.store.commands.append(fault)
