"""What the kernel wants of the world is done here, calls to hosts excepted; what comes of it is told as news.

It owns the work that is under way. It refuses to know why it is wanted: what fails is told, or logged, and never retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from orchestrator.domain.admission import Checked
from orchestrator.domain.effects import (
    AddNode,
    CheckNode,
    ChoosePlan,
    CommitCheckpoint,
    KillNode,
    Loose,
    NoteCheckpoint,
    OnDisk,
    ProbeProgram,
    PruneCheckpoints,
    Sabotage,
    StrikeNode,
)
from orchestrator.domain.errors import EverstepError, NotFound, Refused
from orchestrator.domain.events import (
    CheckpointCommitted,
    CheckpointFailed,
    EffectDone,
    Input,
    NodeChecked,
    NodeStruck,
    PlanChosen,
    ProgramProbed,
    ProgramRefused,
)
from orchestrator.domain.faults import FaultKind
from orchestrator.domain.ids import EffectId, JobId
from orchestrator.ports import Checkpoints, Cluster, NodeProvider, Planner, Prober, Saboteur, StateStore

STALL_S = 3.0
"""How long the store is made to stall where the request does not say."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything outside the kernel."""

    store: StateStore
    cluster: Cluster
    provider: NodeProvider
    prober: Prober
    planner: Planner
    checkpoints: Checkpoints
    saboteur: Saboteur | None = None


class Hands:
    """tell: urgent news for the kernel."""

    def __init__(self, world: World, tell: Callable[[Input], None]) -> None:
        self._world = world
        self._tell = tell
        self._running: set[asyncio.Future[None]] = set()
        self.skew_s = 0.0
        """How far the wall clock has jumped, on purpose."""

    def carry_out(
        self,
        identity: EffectId,
        effect: ProbeProgram | ChoosePlan | CommitCheckpoint | OnDisk | StrikeNode | Loose,
    ) -> None:
        match effect:
            case ProbeProgram():
                self.start(self._answer(identity, effect.job, self._probe(effect)))
            case ChoosePlan():
                self.start(self._answer(identity, effect.job, self._plan(effect)))
            case CommitCheckpoint():
                self.start(self._answer(identity, effect.job, self._checkpoint(effect)))
            case NoteCheckpoint() | PruneCheckpoints():
                self.start(self._keep_house(identity, effect))
            case StrikeNode():
                self.start(self._answer(identity, effect.job, self._strike(effect)))
            case KillNode() | AddNode() | CheckNode() | Sabotage():
                self.provide(effect)

    def provide(self, effect: Loose) -> None:
        """Do what nobody waits for."""
        self.start(self._provide(effect))

    def start(self, work: Awaitable[None]) -> None:
        """Have it done in the background; what it raises is logged."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._finished)

    def cancel(self) -> None:
        """Let go of everything that is under way."""
        for task in self._running:
            task.cancel()

    async def _answer(self, identity: EffectId, job: JobId, work: Awaitable[Input]) -> None:
        """Carry out one effect and put its outcome before the word that it is done, so that both are in one commit."""
        outcome = await work
        self._tell(outcome)
        self._tell(EffectDone(job=job, effect=identity))

    async def _probe(self, effect: ProbeProgram) -> Input:
        try:
            probed = await self._world.prober.probe(effect.spec)
            return ProgramProbed(job=effect.job, profile=probed.profile, start=probed.start)
        except Refused as error:
            return ProgramRefused(job=effect.job, message=error.message)

    async def _plan(self, effect: ChoosePlan) -> Input:
        return PlanChosen(job=effect.job, generation=effect.generation, result=await self._world.planner.choose(effect))

    async def _checkpoint(self, effect: CommitCheckpoint) -> Input:
        try:
            return CheckpointCommitted(job=effect.job, checkpoint=await self._world.checkpoints.commit(effect))
        except (OSError, EverstepError) as error:
            return CheckpointFailed(job=effect.job, step=effect.step, message=str(error))

    async def _strike(self, effect: StrikeNode) -> Input:
        try:
            await self._world.provider.kill(effect.node)
            return NodeStruck(node=effect.node)
        except (OSError, EverstepError) as error:
            return NodeStruck(node=effect.node, refused=str(error))

    async def _keep_house(self, identity: EffectId, effect: OnDisk) -> None:
        try:
            if outcome := await self._world.checkpoints.keep_house(effect):
                self._tell(outcome)
        except (OSError, EverstepError) as error:
            log.warning("checkpoints_not_tidied", effect=type(effect).__name__, job=effect.job, error=str(error))
        self._tell(EffectDone(job=effect.job, effect=identity))

    async def _provide(self, effect: Loose) -> None:
        try:
            if isinstance(effect, KillNode):
                await self._world.provider.kill(effect.node)
            elif isinstance(effect, CheckNode):
                found = await self._check(effect)
                log.info("node_checked", node=effect.node, wrong=found.wrong, pair_wrong=found.pair_wrong, said=found.said)
                self._tell(NodeChecked(node=effect.node, number=effect.number, found=found))
            elif isinstance(effect, Sabotage):
                await self._sabotage(effect)
            else:
                node = await self._world.provider.add(effect.kind, effect.num_devices, effect.labels)
                log.info("node_added", node=node, kind=effect.kind)
        except (OSError, EverstepError) as error:
            log.error("node_provider_failed", effect=type(effect).__name__, error=str(error))

    async def _check(self, effect: CheckNode) -> Checked:
        try:
            return await self._world.provider.check(effect.node, effect.peer)
        except NotFound as error:  # it came from elsewhere, and that is nothing to hold against it
            return Checked(said=f"nothing was tried: {error}")

    async def _sabotage(self, effect: Sabotage) -> None:
        fault, saboteur = effect.fault, self._world.saboteur
        log.warning("fault_injected", kind=fault.fault, id=fault.id)
        if fault.fault is FaultKind.CLOCK_JUMP:
            self.skew_s += fault.jump_s
        elif saboteur is None:
            raise EverstepError(f"{fault.fault} is not possible here; this supervisor was started without a saboteur")
        elif fault.fault is FaultKind.SUPERVISOR_KILL:
            await saboteur.kill_supervisor()
        elif fault.fault is FaultKind.REDIS_STALL:
            await saboteur.stall_store(fault.duration_s or STALL_S)

    def _finished(self, task: asyncio.Future[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception():
            log.error("effect_raised", exc_info=task.exception())
