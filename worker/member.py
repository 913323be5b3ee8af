"""A rank's part in generations, as its training thread plays it: connect, restore, train, and report once when it is over.

It owns the promise to report once per generation, and what ends one: a close, a peer that is lost, something found in the
numbers, or the last step. It refuses to know how orders arrive, how a step is made and who decides about generations.

    form(g) ──> connect, restore, train ──> finished | left: report       a donor, with no seat in g: connect, give
    join ──> receive what a plan to come will give it ──> report          close(g) before it began: report
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import NoReturn, assert_never

from orchestrator.domain.host_events import RankFinished, RankReady, RankReported
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.requests import BeginJoin, CloseGeneration, FormGeneration

from .birth import Job
from .donation import Donation
from .faultpoints import faultpoint
from .faults import Faults
from .joining import Joining
from .loop import Trainer
from .mail import Said, StandBy, StandsBy
from .orders import Orders
from .page.writer import PageWriter
from .parallel.group import PeerLost
from .parallel.mesh import job_cookie
from .parting import why_left
from .progress import Phase, Progress
from .session import Session
from .state.kept import step_of


class Member:
    """progress: told by transfers of training, which may have been given up; the page itself is told the rest.

    say: to the host; num_stuck: how many threads of this process are stuck in transfers.
    """

    def __init__(
        self,
        *,
        job: Job,
        me: Device,
        trainer: Trainer,
        orders: Orders,
        listener: socket.socket,
        page: PageWriter,
        progress: Progress,
        faults: Faults,
        say: Callable[[Said], None],
        num_stuck: Callable[[], int],
    ) -> None:
        self._job = job
        self._me = me
        self._trainer = trainer
        self._orders = orders
        self._listener = listener
        self._page = page
        self._progress = progress
        self._faults = faults
        self._say = say
        self._num_stuck = num_stuck

    def successor(self, progress: Progress) -> Member:
        """One that knows, holds and has promised the same, for a thread that takes over from one stuck in a transfer."""
        made = copy(self)
        made._progress = progress
        made._trainer = self._trainer.successor(progress)
        return made

    def serve(self) -> NoReturn:
        """Answer orders. Raises what the training program raises; Replaced where another thread has taken over."""
        self._faults.patient = self._trainer
        while True:
            match order := self._orders.next():
                case FormGeneration():
                    self._take_part(order)
                case StandBy():
                    self._stand_by(order)
                case BeginJoin():
                    self._join(order)
                case CloseGeneration():
                    if order.generation > self._orders.reported:
                        self._report(order.generation, None, "closed while it waited")
                case _:
                    assert_never(order)

    def _stand_by(self, order: StandBy) -> None:
        try:
            self._trainer.stand_by(order.plan)
        except Exception:
            # It was practice: what fails here for a reason of its own fails again, and is told, where it counts.
            traceback.print_exc()
        self._say(StandsBy())

    # --- a generation -----------------------------------------------------------------------------------------------------

    def _take_part(self, form: FormGeneration) -> None:
        session = self._orders.begin(form.generation, lambda: self._session_for(form))
        if session is None:
            return  # closed before it began; the close is in the inbox too and is answered there
        try:
            if isinstance(session, Donation):
                self._give(session, form)
            else:
                self._train(session, form)
        except Exception as error:
            reason = why_left(error)
            is_closed = self._orders.is_closed(form.generation)
            if reason is None and not is_closed:
                raise
            # Who was told to close cannot say that a peer broke: that peer was told, too.
            lost = reason.rank if isinstance(reason, PeerLost) and not is_closed else None
            self._report(form.generation, lost, "closed" if is_closed else str(reason))

    def _train(self, session: Session, form: FormGeneration) -> None:
        trainer, orders, generation, last = self._trainer, self._orders, form.generation, self._job.order.spec.train.steps
        if generation == 1:
            self._faults.take_from_environment(str(self._me))
        began = time.monotonic()
        session.open()
        self._faults.spoil(session)
        formed = time.monotonic() - began
        self._say_ready(generation, {"form": formed, **trainer.restore(session, form)})
        step = step_of(form.restore)
        while step < last:
            step = Step(step + 1)
            trainer.step(
                session,
                step,
                stop=orders.is_to_stop(generation),
                save=orders.take_save(generation),
                rest=orders.is_to_rest(generation),
                pacing=orders.take_pacing(generation),
            )
            for begin in orders.feeds(generation):
                trainer.feed(begin, job_cookie(self._job.order.job))
            if trainer.is_resting:
                break
            if trainer.is_stopped and step < last:
                self._report(generation, None, "asked to stop after this step")
                return
        evaluation = trainer.evaluate(session, step) if step == last else None
        self._page.phase(Phase.IDLE, generation, step)
        self._say(RankFinished(device=self._me, generation=generation, step=step, evaluation=evaluation))

    def _give(self, donation: Donation, form: FormGeneration) -> None:
        donation.open()
        self._trainer.donate(donation, form)
        donation.close()
        self._page.phase(Phase.IDLE, form.generation, form.committed)

    def _session_for(self, form: FormGeneration) -> Session | Donation:
        self._page.phase(Phase.FORM, form.generation, form.committed)
        order = self._job.order
        moves = form.restore.moves if isinstance(form.restore, FromMemory) else ()
        if self._me in form.donors:
            return Donation(
                plan=form.plan,
                donors=form.donors,
                me=self._me,
                generation=form.generation,
                job=order.job,
                listener=self._listener,
                addresses=form.addresses,
                moves=moves,
                progress=self._page,
            )
        return Session(
            plan=form.plan,
            profile=order.profile,
            seat=form.plan.seat_of[self._me],
            generation=form.generation,
            job=order.job,
            listener=self._listener,
            addresses=form.addresses,
            mirrors=order.spec.recovery.mirrors,
            moves=moves,
            backend=order.spec.recovery.backend,
            progress=self._progress,
            donors=form.donors,
        )

    # --- between generations ----------------------------------------------------------------------------------------------

    def _join(self, begin: BeginJoin) -> None:
        """Receive what the next plan will give this rank, until training stops for it or goes another way."""
        joining = Joining(
            begin=begin,
            me=self._me,
            train=self._job.order.spec.train,
            holdings=self._trainer.room_for(begin),
            listener=self._listener,
            cookie=job_cookie(self._job.order.job),
            say=self._say,
            progress=partial(self._page.copying, "receiving"),
        )
        if not self._orders.begin_joining(joining):
            return
        arrived = joining.run()
        self._page.copying("receiving", 0, 0)
        is_told = self._orders.end_joining(joining)
        if arrived is not None:
            self._trainer.take(arrived)
        if is_told:
            self._report(begin.of, None, "training stopped for this newcomer")

    def _report(self, generation: Generation, lost: Rank | None, cause: str) -> None:
        # Also of a generation it never began: what it voted for in the one before may be what the answer is about.
        report = replace(self._trainer.report(generation, lost, cause), stuck=self._num_stuck())
        faultpoint("before_report")
        self._orders.reported = generation
        self._say(RankReported(report=report))
        faultpoint("after_report")
        self._page.phase(Phase.IDLE, generation, report.passed)

    def _say_ready(self, generation: Generation, phases: dict[str, float]) -> None:
        self._say(RankReady(device=self._me, generation=generation, phases=phases, notes=self._trainer.notes))
        in_words = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in phases.items())
        print(f"{self._me}: generation {generation} ready, {in_words}", flush=True)
