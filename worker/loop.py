"""One rank's mathematics: a trainer restores a generation's state, runs optimizer steps, and afterwards tells the truth.

    step   zero -> forward, backward -> reduce to owners -> pass on to the mirror -> VOTE -> update -> gather -> (save)
            ^                                                                        |`- passed: the step is committed
            `---- exact mode, where the scale did not fit: everybody runs it again --'

It lives as long as its process; connections come and go with generations. It never decides what was committed: it votes,
reports, and is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import assert_never

import torch

from orchestrator.domain.generation import Answer, Arrived, Disagrees, Finding, Held, RankReport
from orchestrator.domain.ids import Device, Generation, NodeId, Rank, Step
from orchestrator.domain.layout import Bucket, buckets, partners
from orchestrator.domain.plan import Pipeline, Plan, Seat, Stage
from orchestrator.domain.profile import Interval, Profile, joined
from orchestrator.domain.protocol import (
    BeginJoin,
    FormGeneration,
    FromCheckpoint,
    FromMemory,
    FromSeed,
    Restore,
    ShardSaved,
)
from orchestrator.domain.spec import JobSpec

from .checkpoint.writer import CheckpointWriter, Snapshot
from .donation import Donation
from .faultpoints import faultpoint
from .feeding import Feeder
from .findings import Found, TrainingDiverged
from .integrity import Copies, Recomputation, check_of
from .parallel.data import DataAxis, Session
from .parallel.gradients import Gradients, gradients_of
from .parallel.group import ALONE
from .parallel.optimizer import adamw
from .parallel.pipeline import StageRunner
from .program import Program
from .progress import Phase, Progress
from .spoiling import flip_bit, spoil_gradient
from .standby import built_for, practise, understudied
from .state.buffers import Buffers, Shape
from .state.holdings import Holdings
from .state.relayout import from_checkpoint, from_memory, from_seed, give

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainer:
    """me: the device this process is bound to; tokens: the whole text, uint8; on_shard is called from a writer thread."""

    def __init__(
        self,
        spec: JobSpec,
        profile: Profile,
        program: Program,
        tokens: torch.Tensor,
        me: Device,
        progress: Progress,
        checkpoint_dir: Path,
        on_shard: Callable[[ShardSaved], None],
        device: torch.device | None = None,
    ) -> None:
        self._spec = spec
        self._profile = profile
        self._program = program
        self._tokens = tokens
        self._me = me
        self._progress = progress
        self._device = device or torch.device("cpu")
        self._writer = CheckpointWriter(checkpoint_dir, profile, me, on_shard)
        self._voted = Step(0)
        self._answer: Answer | None = None
        self._holdings: Holdings | None = None
        # Being filled for a generation that has not begun, all of one step: sources too, for what had arrived.
        self._arriving: list[Holdings] = []
        self._updating = threading.Lock()
        """Held while the holdings change; who copies from them in another thread holds it, too."""
        self._feeders: list[Feeder] = []
        self._is_stopping = False
        self._buffers: Buffers | None = None
        self._gradients: Gradients | None = None
        self._maxima: tuple[float, ...] = ()  # what was voted on the step held, as every rank of the generation knows it
        self._stage: StageRunner | None = None
        self._data: DataAxis | None = None
        self._copies: Copies | None = None
        self._found: tuple[Generation, Finding] | None = None

    # --- between steps --------------------------------------------------------------------------------------------------

    def restore(self, session: Session, form: FormGeneration) -> Mapping[str, float]:
        """Take this rank's seat in a new generation: seconds spent in "build", "transfer" and "gather".

        Until the state of every rank has arrived, what was held before is kept and reported. Raises Aborted, PeerLost,
        CheckpointCorrupt.
        """
        step = _step_of(form.restore)
        self._stop_feeding()
        self._progress.phase(Phase.RESTORE, form.generation, step)
        begun = perf_counter()
        if self._stage is not None:
            self._stage.close()
        self._stage = self._data = self._copies = None
        plan_buckets = buckets(form.plan, self._profile)
        self._build(session, plan_buckets)
        built = perf_counter()
        faultpoint("in_restore")
        self._settle(form.restore)
        self._fill(session, plan_buckets, form.restore)
        moved = perf_counter()
        assert self._buffers is not None and self._gradients is not None and self._holdings is not None
        self._data = DataAxis(session, plan_buckets, self._buffers, self._gradients, self._holdings)
        self._data.gather()
        gathered = perf_counter()
        self._copies = Copies(session, self._spec.recovery)
        if isinstance(form.restore, FromMemory) and self._is_due(step):
            # The generation that committed this step may not have lived to compare it, or to write all of its shards.
            with self._noting(form.generation):
                self._compare_now(self._copies, step)
            self._save(session)
        return {"build": built - begun, "transfer": moved - built, "gather": gathered - moved}

    def stand_by(self, plan: Plan) -> None:
        """Be as ready as can be for a seat of `plan`, whichever it will be. Of no use to who holds state already."""
        if self._holdings is not None:
            return
        seat = understudied(plan, self._profile, self._me)
        if self._buffers is None or self._buffers.shape != Shape.of(plan, seat):
            memory = built_for(plan, self._profile, seat, DTYPES[self._spec.train.dtype], self._device)
            practise(self._spec, self._profile, self._program, plan, seat, memory)
            self._buffers, self._gradients = memory, gradients_of(self._spec.train, self._profile, memory)

    def donate(self, donation: Donation, form: FormGeneration) -> None:
        """Give what this rank holds to members of a generation it has no seat in. Raises Aborted, PeerLost, NotHeld."""
        assert isinstance(form.restore, FromMemory)
        self._stop_feeding()
        self._settle(form.restore)
        give(self._stores(form.restore.step), form.restore.moves, self._me, donation)

    def report(self, generation: Generation, lost_peer: Rank | None = None, cause: str = "") -> RankReport:
        """What this rank knows, whatever it was doing when it left."""
        held = self._holdings if self._holdings is not None and not self._holdings.torn else None
        found = self._found[1] if self._found is not None and self._found[0] == generation else None
        changed = self._copies.changed_since(held) if held is not None and self._copies is not None else None
        return RankReport(
            device=self._me,
            generation=generation,
            voted=self._voted,
            answer=self._answer,
            held=Held(generation=held.generation, step=held.step) if held is not None and changed is None else None,
            lost_peer=lost_peer,
            cause=cause,
            arrived=self._arrived(),
            stopped=self._is_stopping,
            found=found or changed,
        )

    def _arrived(self) -> Arrived | None:
        held = self._holdings
        has = held.covers if held is not None and not held.torn else lambda _: False
        step = max((store.step for store in self._arriving), default=Step(0))
        found = joined(i for store in self._arriving if store.step == step for i in _arrived_in(store) if not has(i))
        return Arrived(step=step, intervals=found) if found else None

    def successor(self, progress: Progress) -> Trainer:
        """One that knows and holds what this one does, for a thread that takes over from one stuck in a transfer.

        It builds everything anew that such a transfer may still write into, which is never what is held.
        """
        made = copy(self)
        made._progress = progress
        made._buffers = made._stage = made._data = None
        return made

    @property
    def holdings(self) -> Holdings | None:
        """The state in this rank's memory, to look at."""
        return self._holdings

    def flush(self) -> None:
        """Returns when every snapshot taken so far has been written, or has failed."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what is still to be written, then ends the writer."""
        self._writer.close()

    # --- newcomers ------------------------------------------------------------------------------------------------------

    def feed(self, begin: BeginJoin, cookie: bytes) -> None:
        """Give newcomers what they are to have from here, in the background, until this generation ends."""
        held = self._holdings
        assert held is not None
        self._feeders = [feeder for feeder in self._feeders if not feeder.is_over]
        for target in sorted({move.target for move in begin.moves if move.source == self._me}):
            feeder = Feeder(
                held=held,
                lock=self._updating,
                me=self._me,
                join=begin.generation,
                attempt=begin.attempt,
                cookie=cookie,
                address=begin.addresses[target],
                intervals=[m.interval for m in begin.moves if (m.source, m.target) == (self._me, target)],
                rate=self._spec.recovery.copy_mb_s * 1e6,
            )
            self._feeders.append(feeder)
            feeder.start()

    def room_for(self, begin: BeginJoin) -> Holdings:
        """What this rank would hold under the next plan, to be filled before that begins."""
        plan, seat = begin.plan, begin.plan.seat_of[self._me]
        partner = partners(plan) if self._spec.recovery.mirrors else {}
        mirrored = next((plan.seat_of[owner].rank for owner, mirror in partner.items() if mirror == self._me), None)
        return Holdings(buckets(plan, self._profile), seat.rank, mirrored, begin.generation, self._device)

    def take(self, arrived: Holdings) -> None:
        """A source from now on, and where the next transfer goes on from."""
        self._arriving.append(arrived)

    @property
    def is_stopped(self) -> bool:
        """Every rank was asked to stop, and the last step was the last."""
        return self._is_stopping

    def _stop_feeding(self) -> None:
        for feeder in self._feeders:
            feeder.stop()
        self._feeders.clear()
        self._is_stopping = False

    # --- the step -------------------------------------------------------------------------------------------------------

    def step(self, session: Session, step: Step, *, stop: bool = False) -> Answer:
        """One optimizer step, the one after what is held.

        stop: this rank was asked to. The vote tells the others, so that all stop after the same step: see `is_stopped`.
        Raises Aborted, PeerLost, NotSaved; Corrupted and TrainingDiverged, which are in the next report too.
        """
        with self._noting(session.generation):
            return self._step(session, step, stop)

    def _step(self, session: Session, step: Step, stop: bool) -> Answer:
        stage, data, held, gradients, copies = self._stage, self._data, self._holdings, self._gradients, self._copies
        if not (stage and data and held and gradients and copies) or held.step != step - 1:
            raise ValueError(f"step {step} cannot follow {held.step if held else 'nothing'}; restore the generation first")
        generation, progress = session.generation, self._progress
        gradients.begin(self._maxima)
        answer = None
        while answer is None:
            progress.phase(Phase.COMPUTE, generation, step)
            with gradients.adding_up():
                losses = self._computed(session, stage, step)
            progress.phase(Phase.REDUCE, generation, step)
            faultpoint("before_reduce")
            data.reduce()
            faultpoint("after_reduce")
            data.mirror()
            progress.phase(Phase.VOTE, generation, step)
            faultpoint("before_vote")
            ballot = gradients.ballot(held.gradient[: held.owned], losses if session.seat.tp == 0 else {})
            self._vote_for(step)
            total = session.vote(torch.cat([ballot.new_tensor([float(stop)]), ballot]), gradients.num_maxima)
            try:
                answer = gradients.answer(total[1:], session.plan.world_size, step)
            except TrainingDiverged:
                # All see the same sum, so all are here: where copies differ, flipped bits of the state are the reason.
                self._compare_now(copies, step)
                raise
            if answer is None:
                # Everybody sees the same and runs it again. Somebody who left without having seen it still says that it
                # voted: should a later pass be committed, it has voted in that one too, with that one's gradients.
                self._vote_for(Step(step - 1))
        self._is_stopping = bool(total[0] > 0)
        self._answer, self._maxima = answer, answer.maxima
        progress.passed(answer)
        faultpoint("after_vote")
        progress.phase(Phase.UPDATE, generation, step)
        with self._updating:
            self._apply(held, answer)
            for feeder in self._feeders:
                feeder.applied(answer)
                if self._is_stopping:
                    feeder.end(step)
        faultpoint("after_update")
        progress.phase(Phase.GATHER, generation, step)
        data.gather()
        faultpoint("after_gather")
        # Last of all, so that what is saved is what was agreed on.
        if copies.is_due(step, self._is_due(step)):
            copies.compare(held)
        if self._is_due(step):
            progress.phase(Phase.SAVE, generation, step)
            self._save(session)
        return answer

    def _computed(self, session: Session, stage: StageRunner, step: Step) -> Mapping[int, float]:
        """Forward and backward of every id; with `recovery.verify`, of one more that another pipeline computes as well."""
        check = check_of(session.plan, step) if self._spec.recovery.verify == "recompute" else None
        if check is None:
            return stage.run(step)
        assert self._buffers is not None
        twice = Recomputation(session, self._buffers, check)
        if twice.is_checker:
            stage.recompute(step, check.number)
            twice.note()
            self._buffers.zero()
        losses = stage.run(step, twice.note_first if twice.is_checked else None)
        twice.compare(step)
        return losses

    def _vote_for(self, step: Step) -> None:
        self._voted = step
        self._progress.voted(step)

    def _apply(self, held: Holdings, answer: Answer) -> None:
        """Bring what is held from the step before the answer's to the answer's; nothing to do where it is there already."""
        if held.step != answer.step - 1:
            return
        held.torn = True
        faultpoint("in_update")
        adamw(self._spec.train, answer, held.state, held.gradient, held.decayed)
        held.step = answer.step
        held.torn = False

    def _compare_now(self, copies: Copies, step: Step) -> None:
        assert self._holdings is not None
        if copies.is_due(step, True):
            copies.compare(self._holdings)

    @contextmanager
    def _noting(self, generation: Generation) -> Iterator[None]:
        """Keep what is found for the report, and leave it where it outlives this process."""
        try:
            yield
        except Found as found:
            self._found = generation, found.finding
            if isinstance(found.finding, Disagrees):
                self._progress.disagrees(found.finding)
            raise

    # --- damage on purpose ----------------------------------------------------------------------------------------------

    def flip_bit(self, seed: int) -> str:
        """Flip one bit of what this rank owns or mirrors, drawn from the seed; in words, which. Training thread only.

        Raises ValueError where it holds nothing.
        """
        if self._holdings is None or self._holdings.torn:
            raise ValueError("no state is held here")
        return flip_bit(self._holdings, seed)

    def spoil_gradient(self, bit: int | None = None) -> str:
        """Make the first element of this step's gradient NaN, or flip that bit of it; in words, what. Training thread only.

        Raises ValueError where no generation is trained.
        """
        if self._buffers is None:
            raise ValueError("no gradient is computed here")
        return spoil_gradient(self._buffers, bit)

    # --- taking a seat --------------------------------------------------------------------------------------------------

    def _build(self, session: Session, plan_buckets: tuple[Bucket, ...]) -> None:
        plan, seat = session.plan, session.seat
        shape = Shape.of(plan, seat)
        if self._buffers is None or self._buffers.shape != shape:
            used = [bucket for bucket in plan_buckets if seat.rank in bucket.shares]
            self._buffers = Buffers(self._profile, shape, used, DTYPES[self._spec.train.dtype], self._device)
            self._gradients = gradients_of(self._spec.train, self._profile, self._buffers)
        assert self._gradients is not None
        # The module is bound to the generation's tp group; it owns no tensors, so making it anew is cheap.
        module = self._program.build(self._spec, shape.first, shape.last, session.tp, self._buffers.leaves)
        self._stage = StageRunner(
            train=self._spec.train,
            module=module,
            pipeline=plan.pipelines[seat.pipeline],
            seat=seat,
            pp=session.pp,
            tokens=self._tokens,
            device=self._device,
            progress=self._progress,
            collect=self._gradients.collect,
        )

    def _settle(self, restore: Restore) -> None:
        """Accept what was recorded as committed: apply the answer where it is missing, forget what was voted beyond it."""
        step, held = _step_of(restore), self._holdings
        answer = restore.answer if isinstance(restore, FromMemory) else None
        if not isinstance(restore, FromMemory):
            # Rolled back: what is in memory belongs to steps that no longer count.
            self._holdings = None
            self._arriving.clear()
        elif held is not None and not held.torn and answer is not None and self._voted == step == answer.step:
            self._apply(held, answer)
        self._voted = step
        # From the order alone: a rank's own memory of an answer that others lack would give it another scale.
        known = restore.checkpoint.answer if isinstance(restore, FromCheckpoint) else answer
        self._maxima = known.maxima if known is not None and known.step == step else ()
        if answer is not None or self._answer is None or self._answer.step != step:
            self._answer = answer

    def _fill(self, session: Session, plan_buckets: tuple[Bucket, ...], restore: Restore) -> None:
        """Replace the holdings by complete ones under the new layout."""
        fresh = Holdings(plan_buckets, session.seat.rank, session.mirrored, session.generation, self._device)
        fresh.step = _step_of(restore)
        match restore:
            case FromSeed():
                from_seed(fresh, self._program, self._spec, self._profile)
            case FromCheckpoint():
                from_checkpoint(fresh, Path(restore.checkpoint.path))
            case FromMemory():
                stores = self._stores(restore.step)
                fresh = self._to_fill(fresh, stores)
                from_memory(fresh, stores, restore.moves, self._me, session)
                # Let nobody drop what another rank may still have to be given again: wait until all have everything.
                session.vote(torch.zeros(1, dtype=torch.float64))
            case _:
                assert_never(restore)
        fresh.arrived = None
        fresh.generation = session.generation
        self._holdings = fresh
        self._arriving.clear()

    def _stores(self, step: Step) -> list[Holdings]:
        """Whatever in this rank's memory is whole at `step`, all of it or in part; of what was arriving the rest goes."""
        held = self._holdings
        stores = [held] if held is not None and not held.torn and held.step == step else []
        for store in reversed(self._arriving):  # the newest was filled from the others as far as it has room
            if store.step == step and not all(any(s.covers(i) for s in stores) for i in _arrived_in(store)):
                stores.append(store)
        self._arriving = [store for store in stores if store is not held]
        return stores

    def _to_fill(self, fresh: Holdings, stores: Sequence[Holdings]) -> Holdings:
        """What is laid out as wanted goes on being filled, or is full already; else `fresh` is, from the beginning."""
        same = next((store for store in stores if store.is_laid_out_like(fresh)), None)
        if same is not None:
            return same
        fresh.arrived = {}
        self._arriving.append(fresh)
        return fresh

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    def _is_due(self, step: Step) -> bool:
        every = self._spec.checkpoint.every
        return bool(every) and step > 0 and (step % every == 0 or step == self._spec.train.steps)

    def _save(self, session: Session) -> None:
        assert self._holdings is not None
        answer = self._answer if self._answer is not None and self._answer.step == self._holdings.step else None
        self._writer.save(Snapshot.of(self._holdings, session.generation, answer))
        if self._holdings.step == self._spec.train.steps:
            self._writer.finish()  # there is no next step to hide it behind, nor one that would try again


def warm(spec: JobSpec, profile: Profile, program: Program) -> None:
    """Run whatever a rank would else import or set up in its first step, in this process, starting no thread.

    The first and the last two layers go forward and backward once, as stages of two pipelines of one rank would, on one
    short sequence; then one optimizer step.
    """
    torch.set_num_threads(1)
    train = replace(spec.train, micro_batches=1, micro_batch_size=1, sequence=min(spec.train.sequence, 64))
    spec = replace(spec, train=train)
    depth = profile.num_layers
    device = Device(NodeId("warm"), 0)
    for first, last in sorted({(0, min(2, depth)), (max(depth - 2, 0), depth)}):
        lines = tuple(line for line in profile.lines if any(first <= layer < last for layer in line.layers))
        part = replace(profile, lines=lines)
        plan = Plan(pipelines=(Pipeline(stages=(Stage(first=first, last=last, devices=(device,)),), micro_batches=(0,)),))
        seat = Seat(rank=Rank(0), device=device, pipeline=0, stage=0, tp=0)
        used = buckets(plan, part)
        held = Holdings(used, Rank(0), None, Generation(0), torch.device("cpu"))
        memory = Buffers(part, Shape.of(plan, seat), used, DTYPES[train.dtype], torch.device("cpu"))
        module = program.build(spec, first, last, ALONE, memory.leaves)
        tokens = torch.zeros(1, train.sequence, dtype=torch.int64)
        zero = torch.zeros(1, dtype=torch.int64)
        x = tokens if first == 0 else torch.zeros(module.hidden_shape, dtype=module.hidden_dtype, requires_grad=True)
        y = module(x, ids=zero, step=zero)
        if last == depth:
            module.loss(y, tokens).backward()  # type: ignore[no-untyped-call]
        else:
            y.backward(torch.zeros_like(y))
        adamw(train, Answer(step=Step(1), norm=0.0, losses=(0.0,)), held.state, held.gradient, held.decayed)


def _arrived_in(store: Holdings) -> Iterator[Interval]:
    for intervals in (store.arrived or {}).values():
        yield from intervals


def _step_of(restore: Restore) -> Step:
    match restore:
        case FromSeed():
            return Step(0)
        case FromCheckpoint():
            return restore.checkpoint.step
        case FromMemory():
            return restore.step
        case _:
            assert_never(restore)
