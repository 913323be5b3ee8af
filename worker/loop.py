"""One rank's mathematics: a trainer restores a generation's state, runs optimizer steps, and afterwards tells the truth.

    restore   build for the seat -> settle what was committed -> fill -> gather        (kept.py, workbench.py)
    step      compute -> reduce -> mirror -> VOTE -> update -> gather -> (save)        (stint.py)
    report    what was voted for, what passed, what is held

It lives as long as its process; connections come and go with generations. It never decides what was committed: it votes,
reports, and is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from time import perf_counter

import torch

from orchestrator.domain.checkpoint import Pacing
from orchestrator.domain.course import Course
from orchestrator.domain.generation import Answer, Disagrees, Evaluation, Finding, Held, RankReport
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Profile
from orchestrator.domain.requests import BeginJoin, FormGeneration
from orchestrator.domain.spec import JobSpec

from .checkpoint.handover import Snapshots
from .donation import Donation
from .faultpoints import faultpoint
from .feeding import Feeders
from .findings import Found
from .integrity import Copies
from .parallel.data import DataAxis, Session
from .program import Program
from .progress import Phase, Progress
from .spoiling import flip_bit, spoil_gradient
from .state.holdings import Holdings
from .state.kept import Kept, step_of
from .stint import Stint
from .workbench import Workbench

CPU = torch.device("cpu")


class Trainer:
    """me: the device this process is bound to, where it takes a seat; device: what tensors are on; speed: its pretence.

    tokens: the whole text, uint8; snapshots: takes what is to be saved.
    """

    def __init__(
        self,
        spec: JobSpec,
        profile: Profile,
        program: Program,
        tokens: torch.Tensor,
        me: Device,
        progress: Progress,
        snapshots: Snapshots,
        device: torch.device = CPU,
        speed: float = 1.0,
    ) -> None:
        self._spec = spec
        self._profile = profile
        self._me = me
        self._progress = progress
        self._snapshots = snapshots
        self._kept = Kept(spec, profile, program, me, device)
        self._workbench = Workbench(spec, profile, program, tokens, device, speed)
        self._feeders = Feeders(me, spec.recovery.copy_mb_s * 1e6)
        self._copies: Copies | None = None
        self._stint: Stint | None = None
        self._found: tuple[Generation, Finding] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of how the state was found."""
        return self._kept.notes

    # --- a generation ---------------------------------------------------------------------------------------------------

    def restore(self, session: Session, form: FormGeneration) -> Mapping[str, float]:
        """Take this rank's seat in a new generation: seconds spent in "build", "transfer" and "gather".

        Until the state of every rank has arrived, what was held before is kept and reported. Raises Aborted, PeerLost,
        NotRestored.
        """
        step, kept = step_of(form.restore), self._kept
        self._feeders.stop()
        self._snapshots.copied()
        self._progress.phase(Phase.RESTORE, form.generation, step)
        begun = perf_counter()
        self._workbench.clear()
        self._stint = self._copies = None
        plan_buckets = buckets(form.plan, self._profile)
        stage, buffers, gradients = self._workbench.build(session, plan_buckets, self._progress)
        built = perf_counter()
        faultpoint("in_restore")
        kept.settle(form.restore)
        with self._noting(form.generation):
            held = kept.fill(session, plan_buckets, form.restore, self._progress)
        moved = perf_counter()
        data = DataAxis(session, plan_buckets, buffers, gradients, held, self._progress)
        data.gather()
        gathered = perf_counter()
        self._copies = Copies(session, self._spec.recovery)
        self._copies.note(held)
        self._stint = Stint(
            spec=self._spec,
            stage=stage,
            buffers=buffers,
            gradients=gradients,
            data=data,
            copies=self._copies,
            kept=kept,
            held=held,
            feeders=self._feeders,
            snapshots=self._snapshots,
            progress=self._progress,
            course=Course(pacing=form.pacing or Pacing.asked_for(self._spec.checkpoint), last=Step(self._spec.train.steps)),
        )
        if self._spec.checkpoint.every:
            self._snapshots.lay_out(held)
        if isinstance(form.restore, FromMemory):
            with self._noting(form.generation):
                self._stint.catch_up(session, step)
        return {"build": built - begun, "transfer": moved - built, "gather": gathered - moved}

    def step(
        self,
        session: Session,
        step: Step,
        *,
        stop: bool = False,
        save: bool = False,
        rest: bool = False,
        pacing: Pacing | None = None,
    ) -> Answer:
        """One optimizer step, the one after what is held.

        stop, save, rest, pacing: this rank was asked to. The vote tells the others, so that all do after the same step: see
        `is_stopped`, `is_resting`.
        Raises Aborted, PeerLost, NotSaved; Corrupted and TrainingDiverged, which are in the next report too.
        """
        held, stint = self._kept.holdings, self._stint
        if stint is None or held is None or held.step != step - 1:
            raise ValueError(f"step {step} cannot follow {held.step if held else 'nothing'}; restore the generation first")
        with self._noting(session.generation):
            return stint.step(session, step, stop=stop, save=save, rest=rest, pacing=pacing)

    def evaluate(self, session: Session, step: Step) -> Evaluation | None:
        """Of the final state; None where the job does not evaluate. Raises Aborted, PeerLost."""
        assert self._stint is not None
        return self._stint.evaluate(session, step)

    @property
    def is_resting(self) -> bool:
        """Every rank was asked to save its last step and make no other."""
        return self._stint is not None and self._stint.is_resting

    @property
    def is_stopped(self) -> bool:
        """Every rank was asked to stop, and the last step was the last."""
        return self._feeders.is_stopping

    def report(self, generation: Generation, lost_peer: Rank | None = None, cause: str = "") -> RankReport:
        """What this rank knows, whatever it was doing when it left."""
        self._snapshots.copied()  # what was begun is handed over now: nobody knows when there will be a next step
        held = self._kept.whole
        if held is not None and held.state.device.type != "cpu":
            # Where a kernel has failed, of an assertion say, this raises that: nothing of such memory can be read any more.
            held.state[:1, :1].cpu()
        found = self._found[1] if self._found is not None and self._found[0] == generation else None
        changed = self._copies.changed_since(held) if held is not None and self._copies is not None else None
        if changed is not None:
            self._kept.forget()  # it must not be taken for whole once nobody remembers that it is not
        return RankReport(
            device=self._me,
            generation=generation,
            voted=self._kept.voted,
            answer=self._kept.answer,
            held=Held(generation=held.generation, step=held.step) if held is not None and changed is None else None,
            lost_peer=lost_peer,
            cause=cause,
            arrived=self._kept.arrived(),
            stopped=self._feeders.is_stopping,
            found=found or changed,
            answered_in=self._kept.answered_in,
        )

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

    def successor(self, progress: Progress) -> Trainer:
        """One that knows and holds what this one does, for a thread that takes over from one stuck in a transfer.

        It builds everything anew that such a transfer may still write into, which is never what is held.
        """
        made = copy(self)
        made._progress = progress
        made._kept, made._feeders = copy(self._kept), copy(self._feeders)
        made._workbench, made._stint = self._workbench.another(), None
        return made

    @property
    def holdings(self) -> Holdings | None:
        """The state in this rank's memory, to look at."""
        return self._kept.holdings

    # --- newcomers, donors and who stands by ----------------------------------------------------------------------------

    def feed(self, begin: BeginJoin, cookie: bytes) -> None:
        """Give newcomers what they are to have from here, in the background, until this generation ends."""
        assert self._kept.holdings is not None
        self._feeders.feed(begin, self._kept.holdings, cookie)

    def donate(self, donation: Donation, form: FormGeneration) -> None:
        """Give what this rank holds to members of a generation it has no seat in. Raises Aborted, PeerLost, NotHeld."""
        assert isinstance(form.restore, FromMemory)
        self._feeders.stop()
        self._snapshots.copied()
        self._kept.settle(form.restore)
        self._kept.give(form.restore, donation)

    def room_for(self, begin: BeginJoin) -> Holdings:
        """What this rank would hold under the next plan, to be filled before that begins."""
        return self._kept.room_for(begin)

    def take(self, arrived: Holdings) -> None:
        """A source from now on, and where the next transfer goes on from."""
        self._kept.take(arrived)

    def stand_by(self, plan: Plan) -> None:
        """Be as ready as can be for a seat of `plan`, whichever it will be. Of no use to who holds state already."""
        if self._kept.holdings is None:
            self._workbench.practise(plan, self._me)

    # --- damage on purpose ----------------------------------------------------------------------------------------------

    def flip_bit(self, seed: int) -> str:
        """Flip one bit of what this rank owns or mirrors, drawn from the seed; in words, which. Training thread only.

        Raises ValueError where it holds nothing.
        """
        if self._kept.holdings is None or self._kept.holdings.torn:
            raise ValueError("no state is held here")
        return flip_bit(self._kept.holdings, seed)

    def spoil_gradient(self, bit: int | None = None) -> str:
        """Make the first element of this step's gradient NaN, or flip that bit of it; in words, what. Training thread only.

        Raises ValueError where no generation is trained.
        """
        if self._workbench.buffers is None or self._stint is None:
            raise ValueError("no gradient is computed here")
        if not self._stint.gradients.takes_floats:
            raise ValueError("gradients have been added up as integers by then; in_compute is before that, not")
        return spoil_gradient(self._workbench.buffers, bit)
