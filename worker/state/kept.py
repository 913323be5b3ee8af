"""What a rank keeps from one generation to the next: its state, what was arriving, what it voted for and what came of it.

It owns which of the state in its memory is whole at which step, and the truth about votes. It never decides what was
committed: it is told, and then applies what it missed and forgets what does not count.

    settle ──> what is held is what was committed ──> fill: held + arriving + messages ──> held, laid out for the new seat
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import assert_never

import torch

from orchestrator.adapters.folder import is_here
from orchestrator.adapters.index import CheckpointAway, CheckpointCorrupt
from orchestrator.adapters.places import place
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.generation import Answer, Arrived, Unreadable
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.layout import Bucket, buckets, partners
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed, Restore
from orchestrator.domain.profile import Interval, Profile, joined
from orchestrator.domain.requests import BeginJoin
from orchestrator.domain.spec import JobSpec

from ..checkpoint.reader import LinkCorrupt
from ..checkpoint.tier import Tier, own_disk
from ..donation import Donation
from ..faultpoints import faultpoint
from ..findings import NotRestored
from ..parallel.data import Session
from ..parallel.optimizer import adamw
from ..program import Program
from ..progress import Progress
from .holdings import Holdings
from .relayout import from_checkpoint, from_memory, from_seed, give

NOTES = 8
"""Of one restore at most."""


class Kept:
    """me: the device this rank is bound to; device: where its tensors are."""

    def __init__(self, spec: JobSpec, profile: Profile, program: Program, me: Device, device: torch.device) -> None:
        self._spec = spec
        self._profile = profile
        self._program = program
        self._me = me
        self._device = device
        self.voted = Step(0)
        self.answer: Answer | None = None
        self.answered_in = Generation(0)
        """Whose vote that was; 0 where it came with an order."""
        self.maxima: tuple[float, ...] = ()
        """What was voted on the step held, as every rank of the generation knows it."""
        self.holdings: Holdings | None = None
        # Being filled for a generation that has not begun, all of one step: sources too, for what had arrived.
        self._arriving: list[Holdings] = []
        self.notes: tuple[str, ...] = ()
        """What people should know of how this generation's state was found."""

    @property
    def whole(self) -> Holdings | None:
        """What is held, where no update was cut short in it."""
        return self.holdings if self.holdings is not None and not self.holdings.torn else None

    def forget(self) -> None:
        """What is held is not what it should be."""
        self.holdings = None

    # --- at a generation's beginning ------------------------------------------------------------------------------------

    def settle(self, restore: Restore) -> None:
        """Accept what was recorded as committed: apply the answer where it is missing, forget what was voted beyond it."""
        step, held = step_of(restore), self.holdings
        answer = restore.answer if isinstance(restore, FromMemory) else None
        if not isinstance(restore, FromMemory):
            # Rolled back: what is in memory belongs to steps that no longer count.
            self.holdings = None
            self._arriving.clear()
        elif held is not None and not held.torn and answer is not None and self.voted == step == answer.step:
            self.apply(held, answer)
        self.voted = step
        # From the order alone: a rank's own memory of an answer that others lack would give it another scale.
        known = restore.checkpoint.answer if isinstance(restore, FromCheckpoint) else answer
        self.maxima = known.maxima if known is not None and known.step == step else ()
        if answer is not None or self.answer is None or self.answer.step != step:
            self.answer, self.answered_in = answer, Generation(0)

    def fill(self, session: Session, plan_buckets: tuple[Bucket, ...], restore: Restore, progress: Progress) -> Holdings:
        """Replace the holdings by complete ones under the new layout. Raises Aborted, PeerLost, NotRestored."""
        fresh = Holdings(plan_buckets, session.seat.rank, session.mirrored, session.generation, self._device)
        fresh.step = step_of(restore)
        self.notes = ()
        read_back, received = partial(progress.copying, "restoring"), partial(progress.copying, "receiving")
        match restore:
            case FromSeed():
                from_seed(fresh, self._program, self._spec, self._profile)
            case FromCheckpoint():
                with self._near(restore.checkpoint) as near:
                    from_checkpoint(fresh, place(restore.checkpoint.path), near, read_back)
            case FromMemory():
                stores = self._stores(restore.step)
                fresh = self._to_fill(fresh, stores)
                if restore.checkpoint is None:
                    from_memory(fresh, stores, restore.moves, self._me, session, received=received)
                else:
                    lost = [read.interval for read in restore.reads if read.target == self._me]
                    path = place(restore.checkpoint.path)
                    with self._near(restore.checkpoint) as near:
                        from_memory(fresh, stores, restore.moves, self._me, session, lost, path, near, received, read_back)
                # Let nobody drop what another rank may still have to be given again: wait until all have everything.
                session.vote(torch.zeros(1, dtype=torch.float64))
            case _:
                assert_never(restore)
        progress.copying("restoring", 0, 0)
        fresh.arrived = None
        fresh.generation = session.generation
        self.holdings = fresh
        self._arriving.clear()
        return fresh

    def give(self, restore: FromMemory, donation: Donation) -> None:
        """What members of a generation that this rank has no seat in lack. Raises Aborted, PeerLost, NotHeld."""
        give(self._stores(restore.step), restore.moves, self._me, donation)

    # --- in it ----------------------------------------------------------------------------------------------------------

    def apply(self, held: Holdings, answer: Answer) -> None:
        """Bring what is held from the step before the answer's to the answer's; nothing to do where it is there already."""
        if held.step != answer.step - 1:
            return
        held.torn = True
        faultpoint("in_update")
        adamw(self._spec.train, answer, held.state, held.gradient, held.decayed)
        held.step = answer.step
        held.torn = False

    # --- between generations --------------------------------------------------------------------------------------------

    def room_for(self, begin: BeginJoin) -> Holdings:
        """What this rank would hold under the next plan, to be filled before that begins."""
        plan, seat = begin.plan, begin.plan.seat_of[self._me]
        partner = partners(plan) if self._spec.recovery.mirrors else {}
        mirrored = next((plan.seat_of[owner].rank for owner, mirror in partner.items() if mirror == self._me), None)
        return Holdings(buckets(plan, self._profile), seat.rank, mirrored, begin.generation, self._device)

    def take(self, arrived: Holdings) -> None:
        """A source from now on, and where the next transfer goes on from."""
        self._arriving.append(arrived)

    def arrived(self) -> Arrived | None:
        """What this rank has of the next plan's, beyond what it holds."""
        has = self.whole.covers if self.whole is not None else lambda _: False
        step = max((store.step for store in self._arriving), default=Step(0))
        found = joined(i for store in self._arriving if store.step == step for i in _arrived_in(store) if not has(i))
        return Arrived(step=step, intervals=found) if found else None

    # --- what is where --------------------------------------------------------------------------------------------------

    def _stores(self, step: Step) -> list[Holdings]:
        """Whatever in this rank's memory is whole at `step`, all of it or in part; of what was arriving the rest goes."""
        held = self.holdings
        stores = [held] if held is not None and not held.torn and held.step == step else []
        for store in reversed(self._arriving):  # the newest was filled from the others as far as it has room
            if store.step == step and not all(any(s.covers(i) for s in stores) for i in _arrived_in(store)):
                stores.append(store)
        self._arriving = [store for store in stores if store is not held]
        return stores

    @contextmanager
    def _near(self, checkpoint: CheckpointRef) -> Iterator[Tier | None]:
        """This node's own copy, where there is one; what was wrong with it is noted. Raises NotRestored."""
        folder = place(checkpoint.path).parent
        near = own_disk(self._spec.checkpoint.local, self._me.node, folder)
        try:
            yield near
        except CheckpointCorrupt as error:
            since = error.step if isinstance(error, LinkCorrupt) else Step(0)
            is_away = isinstance(error, CheckpointAway) or not is_here(folder)
            found = Unreadable(step=checkpoint.step, generation=checkpoint.generation, since=since, is_away=is_away)
            raise NotRestored(found, str(error)) from error
        finally:
            if near is not None:
                self.notes = tuple(near.bad[:NOTES])

    def _to_fill(self, fresh: Holdings, stores: Sequence[Holdings]) -> Holdings:
        """What is laid out as wanted goes on being filled, or is full already; else `fresh` is, from the beginning."""
        same = next((store for store in stores if store.is_laid_out_like(fresh)), None)
        if same is not None:
            return same
        fresh.arrived = {}
        self._arriving.append(fresh)
        return fresh


def step_of(restore: Restore) -> Step:
    """The step that training goes on from."""
    match restore:
        case FromSeed():
            return Step(0)
        case FromCheckpoint():
            return restore.checkpoint.step
        case FromMemory():
            return restore.step
        case _:
            assert_never(restore)


def _arrived_in(store: Holdings) -> Iterator[Interval]:
    for intervals in (store.arrived or {}).values():
        yield from intervals
