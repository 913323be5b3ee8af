"""One rank's work in one generation: the steps between taking a seat and leaving it.

    step   zero -> forward, backward -> reduce to owners -> pass on to the mirror -> VOTE -> update -> gather -> (save)
            ^                                                                        |`- passed: the step is committed
            `---- exact mode, where the scale did not fit: everybody runs it again --'

Where it is due, held-out text is evaluated first, under the weights that the step before left; the vote tells of that too.

It owns the order within a step and what is compared and saved after it: the state, or of a journal entry the gradient that
led to it. It refuses to know how its seat came about and what becomes of what it raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

import torch

from orchestrator.domain.checkpoint import CheckpointKind, Pacing
from orchestrator.domain.course import Course
from orchestrator.domain.generation import Answer, Evaluation
from orchestrator.domain.ids import Step
from orchestrator.domain.spec import JobSpec

from .checkpoint.handover import Snapshots
from .faultpoints import faultpoint
from .feeding import Feeders
from .findings import TrainingDiverged
from .integrity import Copies, Recomputation, check_of
from .parallel.data import DataAxis, Session
from .parallel.gradients import Gradients
from .parallel.pipeline import StageRunner
from .progress import Phase, Progress
from .state.buffers import Buffers
from .state.holdings import Holdings
from .state.kept import Kept

_WORDS = 6
"""Of a ballot, before what is compared: ranks asked to stop, to save, without room, the new pacing, ranks asked to rest,
and the summed loss of held-out text."""


@dataclass(slots=True, kw_only=True)
class Stint:
    """held: what `kept` holds, laid out for this generation; feeders: told of each update, and stopped by who ends this.
    course: what is saved, decided from votes alone."""

    spec: JobSpec
    stage: StageRunner
    buffers: Buffers
    gradients: Gradients
    data: DataAxis
    copies: Copies
    kept: Kept
    held: Holdings
    feeders: Feeders
    snapshots: Snapshots
    progress: Progress
    course: Course
    is_resting: bool = False
    has_stepped: bool = False
    """The first step of a generation says nothing about how fast this rank is."""

    def catch_up(self, session: Session, step: Step) -> None:
        """The generation that committed `step` may not have lived to compare it, or to write all of its shards."""
        if self.course.pacing.is_journal and step < self.course.last:
            return  # the next one is a base
        if self.course.due(step) is not None:
            self._compare(step)
            self._save(session, "base", num_full=int(self._has_no_room(step)))

    def step(self, session: Session, step: Step, *, stop: bool, save: bool, rest: bool, pacing: Pacing | None) -> Answer:
        """The step after what is held; see Trainer.step."""
        data, held, gradients, kept = self.data, self.held, self.gradients, self.kept
        generation, progress = session.generation, self.progress
        gradients.begin(kept.maxima)
        before = Step(step - 1)
        is_evaluated = self.spec.evaluation.is_due(before, self.spec.train.steps)
        evaluated = self._evaluated(session, before) if is_evaluated else 0.0
        answer = None
        while answer is None:
            progress.phase(Phase.COMPUTE, generation, step)
            with gradients.adding_up():
                losses = self._computed(session, step)
            progress.phase(Phase.REDUCE, generation, step)
            faultpoint("before_reduce")
            self.snapshots.copied(entry=True)
            data.reduce()
            faultpoint("after_reduce")
            mirroring = data.mirror()
            # Beside it, so that it has often come to its end when it is waited for.
            ballot = gradients.ballot(held.gradient[: held.owned], losses if session.seat.tp == 0 else {})
            of_copies = self.copies.ballot(held)
            if mirroring is not None:
                mirroring.wait()
            progress.phase(Phase.VOTE, generation, step)
            faultpoint("before_vote")
            self._vote_for(step)
            asked = [float(stop), float(save), float(self._has_no_room(step)), _word(pacing), float(rest), evaluated]
            words = ballot.new_tensor(asked)
            total = session.vote(torch.cat([words, of_copies, ballot]), gradients.num_maxima)
            sums, found = total[_WORDS : _WORDS + Copies.NUM_ENTRIES], total[_WORDS + Copies.NUM_ENTRIES :]
            try:
                if self.copies.agree(sums, held, step):
                    answer = gradients.answer(found, session.plan.world_size, step)
            except TrainingDiverged:
                # All see the same sum, so all are here: where copies differ, flipped bits of the state are the reason.
                self._compare(step)
                raise
            if answer is None:
                # Everybody sees the same and runs it again. Somebody who left without having seen it still says that it
                # voted: should a later pass be committed, it has voted in that one too, with that one's gradients.
                self._vote_for(Step(step - 1))
        self.feeders.is_stopping = bool(total[0] > 0)
        if is_evaluated:
            answer = replace(answer, evaluation=self._evaluation(before, float(total[5])))
        kept.answer, kept.answered_in, kept.maxima = answer, generation, answer.maxima
        computed_s = self.stage.computed_s()
        progress.computed(computed_s if self.has_stepped else 0.0)
        self.has_stepped = True
        progress.passed(answer)
        faultpoint("after_vote")
        progress.phase(Phase.UPDATE, generation, step)
        self.snapshots.copied()
        with self.feeders.updating:
            kept.apply(held, answer)
            self.feeders.applied(answer)
        self.copies.note(held)
        faultpoint("after_update")
        progress.phase(Phase.GATHER, generation, step)
        data.gather()
        faultpoint("after_gather")
        # Last of all, so that what is saved is what was agreed on.
        if total[3] > 0:
            self.course = replace(self.course, pacing=_pacing(int(total[3])))
        kind = self.course.due(step, is_asked=bool(total[1] > 0 or total[4] > 0))
        # An entry is made again from a base and what all had agreed on: what is in memory now is no part of it.
        if self.copies.is_due(step, kind == "base"):
            self.copies.compare(held)
        if kind is not None:
            progress.phase(Phase.SAVE, generation, step)
            self._save(session, kind, num_full=int(total[2]))
        # Where there was no room nothing was saved, and whoever was asked asks again.
        self.is_resting = bool(total[4] > 0) and not int(total[2])
        if self.is_resting:
            self.snapshots.copied()  # no later step will wait for it
        return answer

    def evaluate(self, session: Session, step: Step) -> Evaluation | None:
        """Of the last step, which no other follows to tell of it; None where the job does not evaluate."""
        if not self.spec.evaluation.is_due(step, self.spec.train.steps):
            return None
        total = session.vote(torch.tensor([self._evaluated(session, step)], dtype=torch.float64))
        return self._evaluation(step, float(total[0]))

    def _evaluated(self, session: Session, step: Step) -> float:
        """What this rank puts into a vote: all of its tensor-parallel group have the same."""
        self.progress.phase(Phase.EVALUATE, session.generation, step)
        faultpoint("in_evaluation")
        total = self.stage.evaluate()
        return total if session.seat.tp == 0 else 0.0

    def _evaluation(self, step: Step, total: float) -> Evaluation:
        train = self.spec.train
        loss = total / (self.spec.evaluation.micro_batches * train.micro_batch_size * train.sequence)
        return Evaluation(step=step, loss=loss if isfinite(loss) else None)

    def _computed(self, session: Session, step: Step) -> Mapping[int, float]:
        """Forward and backward of every id; with `recovery.verify`, of one more that another pipeline computes as well."""
        check = check_of(session.plan, step) if self.spec.recovery.verify == "recompute" else None
        if check is None:
            return self.stage.run(step)
        twice = Recomputation(session, self.buffers, check)
        if twice.is_checker:
            self.stage.recompute(step, check.number)
            twice.note()
            self.buffers.zero()
        losses = self.stage.run(step, twice.note_first if twice.is_checked else None)
        twice.compare(step)
        return losses

    def _vote_for(self, step: Step) -> None:
        self.kept.voted = step
        self.progress.voted(step)

    def _compare(self, step: Step) -> None:
        if self.copies.is_due(step, True):
            self.copies.compare(self.held)

    def _has_no_room(self, step: Step) -> bool:
        """Whether a snapshot after this step could not be taken at once, should there be one; the last is waited for."""
        every = 1 if self.course.pacing.is_journal else self.course.pacing.every
        return not self.snapshots.is_ready(self.held, every) and step < self.spec.train.steps

    def _save(self, session: Session, kind: CheckpointKind, num_full: int) -> None:
        """num_full: ranks without room for a snapshot. One without it would make everybody else's worthless."""
        held, generation = self.held, session.generation
        answer = self.kept.answer if self.kept.answer is not None and self.kept.answer.step == held.step else None
        if held.step == self.spec.train.steps:
            # There is no next step to hide it behind, nor one that would try again.
            self.snapshots.take_last(
                held, generation, answer, lambda: self.progress.phase(Phase.SAVE, generation, held.step)
            )
        elif not num_full:
            self.snapshots.take(held, generation, answer, is_entry=kind == "journal")
            self.course = self.course.saved(held.step, kind)
        else:
            self.course = self.course.skipped()
            if session.seat.rank == 0:
                what = f"{num_full} of {session.plan.world_size} ranks still have two snapshots that are not written"
                self.snapshots.skip(held.step, generation, f"{what}: they come faster than the disk takes them")


def _word(pacing: Pacing | None) -> float:
    """In a ballot; 0 where nothing changes."""
    return float(2 * pacing.every + pacing.is_journal) if pacing is not None else 0.0


def _pacing(word: int) -> Pacing:
    return Pacing(every=word // 2, is_journal=bool(word % 2))
