"""What a generation's members start with: what they kept, what is moved to them, and whether that is whole and right.

It owns the checks that no transfer leaves a gap or takes what its source does not have. It refuses to know when anything
happens: the arena says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.ids import Device, JobId, Step
from orchestrator.domain.layout import Layout, Move
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed
from orchestrator.domain.profile import Interval
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import JobSpec
from orchestrator.recovery.retention import reads

from .memory import Flip, Memory, Violation, check_filled
from .place import Place
from .rank import SimRank
from .scenario import maxima


class Filling:
    """here: the generation's members and donors, as they are at any time."""

    def __init__(
        self, place: Place, job: JobId, spec: JobSpec, form: FormGeneration, plan: Layout, here: Mapping[Device, SimRank]
    ) -> None:
        self._place = place
        self._job = job
        self._spec = spec
        self._form = form
        self._layout = plan
        self._here = here
        self._sources: dict[Device, Memory] = {}

    @property
    def step(self) -> Step:
        """Where the generation starts from."""
        match self._form.restore:
            case FromSeed():
                return Step(0)
            case FromCheckpoint(checkpoint=checkpoint):
                return checkpoint.step
            case FromMemory(step=step):
                return step

    def begin(self, members: tuple[Device, ...]) -> None:
        """All are there and bring what they hold to the step that is restored. Raises Violation."""
        restore = self._form.restore
        for device in members:
            self._here[device].settle(restore)
        checkpoint = None if isinstance(restore, FromSeed) else restore.checkpoint
        is_there = checkpoint is None or checkpoint.path in self._place.paths(self._job)
        if not is_there and not self._place.has_forgotten:  # one that knew of a newer checkpoint may have swept it since
            raise Violation(f"generation {self._form.generation} restores from {checkpoint}, which was never committed")
        if isinstance(restore, FromMemory) and checkpoint is not None and checkpoint.step != restore.step:
            raise Violation(f"generation {self._form.generation} mixes step {restore.step} with {checkpoint}")
        if isinstance(restore, FromMemory) and checkpoint is not None:
            self._place.note(
                f"  {self._job} reads {len(restore.reads)} intervals that are in no memory from {checkpoint.path}"
            )
        if isinstance(restore, FromSeed) and self._place.scenario.start_of(self._job):
            raise Violation(
                f"generation {self._form.generation} begins with the seed, and {self._job} asked for a checkpoint"
            )
        if isinstance(restore, FromMemory):
            self._check_moves(restore)
            # Now, because a source that has restored holds something else.
            self._sources = {device: memory for device, rank in self._here.items() if (memory := rank.memory)}
        if not isinstance(restore, FromSeed) and self.step:
            self._check_answer(restore)

    def receive_some(self, rank: SimRank) -> None:
        """A transfer that is cut short has brought some of it."""
        rank.arrived.extend(self._reads_of(rank.device))
        for move in self._moves_to(rank.device):
            if self._place.rng.random() < 0.5:
                rank.arrived.append(move.interval)

    def receive_all(self, rank: SimRank) -> None:
        rank.arrived.extend((*self._reads_of(rank.device), *(move.interval for move in self._moves_to(rank.device))))

    def kill_donor(self) -> None:
        """Where one is doomed, it dies while it gives what it holds."""
        donors = sorted({m.source for m in self._moves if m.source != m.target and m.source in self._here})
        if donors and self._job in self._place.doomed_donors:
            self._place.doomed_donors.discard(self._job)
            rank = self._here[self._place.rng.choice(donors)]
            self._place.note(f"* {self._job} on {rank.device} dies while it gives what it holds")
            rank.host.kill(rank)

    def memory(self, device: Device) -> Memory:
        """Of a member that has received everything."""
        held, wrong = self._layout.held(device), self._brought(device)
        restore = self._form.restore
        read = held if isinstance(restore, FromCheckpoint) else self._reads_of(device)
        for link in self._links():
            if flip := self._place.forged.get(link.path):
                wrong |= {flip} if flip.is_in(read) else set()
        return Memory(self._form.generation, self.step, held, wrong)

    def damaged(self) -> list[Step]:
        """Steps of what the checkpoint is read through that nobody can read."""
        links = self._links()
        restore = self._form.restore
        if not links and not isinstance(restore, FromSeed) and restore.checkpoint is not None:
            return [restore.checkpoint.step]
        return [link.step for link in links if link.path in self._place.damaged]

    def _links(self) -> list[CheckpointRef]:
        """What the checkpoint that is restored from is read through, itself included."""
        restore = self._form.restore
        checkpoint = None if isinstance(restore, FromSeed) else restore.checkpoint
        if checkpoint is None:
            return []
        return [one for one in self._place.checkpoints[self._job] if reads(checkpoint, one)]

    # --- checks -----------------------------------------------------------------------------------------------------------

    def _check_answer(self, restore: FromMemory | FromCheckpoint) -> None:
        """An exact job goes on with the scale that an undisturbed run would have."""
        answer = restore.answer if isinstance(restore, FromMemory) else restore.checkpoint.answer
        if self._spec.train.exact and (answer is None or answer.maxima != maxima(self._spec, self.step)):
            raise Violation(f"generation {self._form.generation} starts from step {self.step} and is told {answer}")

    def _check_moves(self, restore: FromMemory) -> None:
        generation = self._form.generation
        for device in self._form.plan.devices:
            moved = [move.interval for move in restore.moves if move.target == device] + self._reads_of(device)
            kept = self._here[device].kept_beside(moved, restore.step)
            check_filled(f"{device} in generation {generation}", self._layout.held(device), kept, moved)
        for move in restore.moves:
            source = self._here.get(move.source)
            if source is None or not source.covers(move.interval, restore.step):
                held = source.memory if source else None
                raise Violation(f"{move} of generation {generation} at step {restore.step}: the source holds {held}")

    # --- what comes along -------------------------------------------------------------------------------------------------

    @property
    def _moves(self) -> tuple[Move, ...]:
        return self._form.restore.moves if isinstance(self._form.restore, FromMemory) else ()

    def _moves_to(self, device: Device) -> list[Move]:
        return [move for move in self._moves if move.target == device]

    def _reads_of(self, device: Device) -> list[Interval]:
        restore = self._form.restore
        reads = restore.reads if isinstance(restore, FromMemory) else ()
        return [read.interval for read in reads if read.target == device]

    def _brought(self, device: Device) -> frozenset[Flip]:
        """Flipped bits come along with what they are in, moved or kept."""
        restore = self._form.restore
        if not isinstance(restore, FromMemory):
            return frozenset()
        moves = self._moves_to(device)
        moved = {flip for move in moves for flip in self._wrong_at(move.source) if flip.is_in((move.interval,))}
        own = self._sources.get(device)
        if own is not None and own.step == restore.step:
            arrived, held = [move.interval for move in moves], self._layout.held(device)
            moved |= {flip for flip in own.wrong if flip.is_in(held) and not flip.is_in(arrived)}
        return frozenset(moved)

    def _wrong_at(self, source: Device) -> frozenset[Flip]:
        """What had arrived somewhere without being held yet counts as right."""
        return self._sources[source].wrong if source in self._sources else frozenset()
