"""One training process: a main thread that trains and a control thread that obeys.

It owns the order of things between the two (a close may overtake a form, a peer may be lost before anybody says so) and
the promise to report once per generation. It refuses to know how a step is made or who decides about generations.

    control thread   form(g) ──> inbox          close(g) ──> session.abort(), then inbox
    main thread      inbox ──> connect, restore, train ──> finished | left: report once ──> inbox ...

A training thread that is stuck in a transfer which no abort can end is given up after STUCK_S: another one takes over what
it knows and holds, reports and goes on, and the old one ends silently when it comes out.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.plan import Plan
from orchestrator.domain.protocol import (
    BeginJoin,
    CloseGeneration,
    EndJoin,
    FormGeneration,
    FromCheckpoint,
    FromMemory,
    FromSeed,
    InjectFault,
    OpenHost,
    RankFinished,
    RankReady,
    RankReported,
    Restore,
    StopAfter,
)

from .donation import Donation
from .faultpoints import faultpoint
from .faults import Faults
from .findings import Found
from .joining import Joining
from .loop import Trainer
from .mail import BROKEN, Channel, Passed, Raised, StandBy, StandsBy, ToRank, passed_frame, read_order, said_frame
from .page import PageWriter
from .parallel.forming import NotFormed
from .parallel.group import Aborted, PeerLost
from .parallel.guard import Replaced
from .parallel.mesh import job_cookie
from .program import Program
from .progress import Phase, Progress, Relay
from .session import Session

STUCK_S = 0.05
"""Leaving takes a few milliseconds; who is still in a transfer after this long is taken for stuck."""
_SWITCH_INTERVAL_S = 0.001
_NICE = 5
"""Where ranks compute on the processors that host, supervisor and Redis run on, those must not wait for a time slice."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a host shares, copy on write."""

    order: OpenHost
    program: Program
    tokens: torch.Tensor


class Inherited(NamedTuple):
    """Descriptors a rank is born with."""

    control: int
    listener: int
    page: int
    log: int


def die_with_parent(parent: int) -> None:
    """Be killed when the parent's forking thread ends; ends this process at once where that has happened already."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        os._exit(BROKEN)


def main(job: Job, me: Device, inherited: Inherited, zygote: int) -> NoReturn:
    """The forked child, from its first instruction; never returns."""
    code = BROKEN
    try:
        # Whatever changes the user id comes before this line: setuid clears the death signal.
        die_with_parent(zygote)
        os.nice(_NICE)
        _keep_only(inherited)
        _write_to(inherited.log)
        code = _Rank(job, me, inherited).run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Watched(PageWriter):
    """The page, and word to the host at each vote that passes: losses would die with this rank."""

    def __init__(self, fd: int, control: Channel) -> None:
        super().__init__(fd)
        self._control = control

    def passed(self, answer: Answer) -> None:
        super().passed(answer)
        self._control.post(passed_frame(Passed(generation=self.generation, answer=answer)), droppable=True)

    def micro_batch(self, number: int) -> None:
        super().micro_batch(number)
        faultpoint("in_compute")


class _Rank:
    def __init__(self, job: Job, me: Device, inherited: Inherited) -> None:
        self._job = job
        self._me = me
        self._control = Channel(socket.socket(fileno=inherited.control))
        self._listener = socket.socket(fileno=inherited.listener)
        self._page = _Watched(inherited.page, self._control)
        os.close(inherited.page)
        self._faults = Faults(self._page, lambda struck: self._control.post(said_frame(struck)))
        self._inbox: queue.SimpleQueue[FormGeneration | CloseGeneration | BeginJoin | StandBy] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Under the lock: both threads ask whether the session that is about to begin was closed before it began.
        self._closed = Generation(0)
        self._session: Session | Donation | Joining | None = None
        self._session_of = Generation(0)
        self._feeds: queue.SimpleQueue[BeginJoin] = queue.SimpleQueue()
        """Newcomers to give state to, from the control thread to the training loop."""
        self._stop_after = Generation(0)
        self._ended_join = Generation(0)
        self._look_at = inf
        """When to look whether the training thread is stuck; the control thread's own."""
        # The training thread's own, but for handing over.
        self._reported = Generation(0)
        self._trains: Trainer | None = None
        self._progress: Progress = self._page
        self._stuck = 0

    def run(self) -> int:
        """Train until the training program raises or exits; its exit code. The host ends a rank by a signal."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)  # a close must not wait long for a main thread that computes in Python
        threading.Thread(target=self._obey, name="control", daemon=True).start()
        try:
            return self._train()
        except Replaced:
            self._came_out()
            while True:  # the process ends when the thread that has taken over says so
                signal.pause()

    def _take_over(self) -> None:
        """A training thread after the first: the same work, and the same end of the process."""
        torch.set_num_threads(1)
        code = BROKEN
        try:
            code = self._train()
        except Replaced:
            self._came_out()
            return
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _came_out(self) -> None:
        """A thread that was replaced is not stuck any more."""
        with self._lock:
            self._stuck -= 1

    def _train(self) -> int:
        try:
            trainer = self._trains = self._trains or self._trainer()
            self._faults.patient = trainer
            while True:
                match self._inbox.get():
                    case FormGeneration() as form:
                        self._take_part(trainer, form)
                    case StandBy(plan=plan):
                        self._stand_by(trainer, plan)
                    case BeginJoin() as begin:
                        self._join(trainer, begin)
                    case CloseGeneration(generation=generation):
                        if generation > self._reported:
                            self._report(trainer, generation, None, "closed while it waited")
        except (Exception, SystemExit, KeyboardInterrupt) as caught:
            error = _programs_own(caught)
            traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
            self._control.post(said_frame(Raised(message=_in_one_line(error))))
            self._drain()
            return _exit_code(error)

    def _trainer(self) -> Trainer:
        order = self._job.order
        return Trainer(
            spec=order.spec,
            profile=order.profile,
            program=self._job.program,
            tokens=self._job.tokens,
            me=self._me,
            progress=self._own_progress(),
            checkpoint_dir=Path(order.checkpoint_dir),
            on_shard=lambda saved: self._control.post(said_frame(saved)),
        )

    def _stand_by(self, trainer: Trainer, plan: Plan) -> None:
        try:
            trainer.stand_by(plan)
        except Exception:
            # It was practice: what fails here for a reason of its own fails again, and is told, where it counts.
            traceback.print_exc()
        self._control.post(said_frame(StandsBy()))

    def _own_progress(self) -> Progress:
        """The page; where this thread may be replaced, through something that can be muted then."""
        self._progress = Relay(self._page) if self._job.order.spec.recovery.backend == "gloo" else self._page
        return self._progress

    def _take_part(self, trainer: Trainer, form: FormGeneration) -> None:
        session = self._begin(form)
        if session is None:
            return  # closed before it began; the close is in the inbox too and is answered there
        if isinstance(session, Donation):
            self._give(trainer, session, form)
            return
        generation = form.generation
        if generation == 1:
            self._faults.take_from_environment(str(self._me))
        try:
            began = time.monotonic()
            session.open()
            self._faults.spoil(session)
            formed = time.monotonic() - began
            phases = {"form": formed, **trainer.restore(session, form)}
            self._say_ready(generation, phases)
            step = _restored_step(form.restore)
            while step < self._job.order.spec.train.steps:
                step = Step(step + 1)
                trainer.step(session, step, stop=self._stop_after >= generation)
                self._feed(trainer, generation)
                if trainer.is_stopped and step < self._job.order.spec.train.steps:
                    self._report(trainer, generation, None, "asked to stop after this step")
                    return
            self._page.phase(Phase.IDLE, generation, step)
            self._control.post(said_frame(RankFinished(device=self._me, generation=generation, step=step)))
        except Exception as error:
            reason = _why_left(error)
            closed = self._closed >= generation
            if reason is None and not closed:
                raise
            # Who was told to close cannot say that a peer broke: that peer was told, too.
            lost = reason.rank if isinstance(reason, PeerLost) and not closed else None
            self._report(trainer, generation, lost, "closed" if closed else str(reason))

    def _feed(self, trainer: Trainer, generation: Generation) -> None:
        while not self._feeds.empty():
            begin = self._feeds.get()
            if begin.of == generation:
                trainer.feed(begin, job_cookie(self._job.order.job))

    def _join(self, trainer: Trainer, begin: BeginJoin) -> None:
        """Receive what the next plan will give this rank, until training stops for it or goes another way."""
        joining = Joining(
            begin=begin,
            me=self._me,
            train=self._job.order.spec.train,
            holdings=trainer.room_for(begin),
            listener=self._listener,
            cookie=job_cookie(self._job.order.job),
            say=lambda said: self._control.post(said_frame(said)),
        )
        with self._lock:
            if begin.generation <= max(self._closed, self._session_of):
                return  # it came too late
            self._session, self._session_of = joining, begin.generation
            if begin.generation <= self._ended_join:
                joining.end()
        arrived = joining.run()
        with self._lock:
            self._session = None
            is_told = not joining.is_aborted
        if arrived is not None:
            trainer.take(arrived)
        if is_told:
            self._report(trainer, begin.of, None, "training stopped for this newcomer")

    def _give(self, trainer: Trainer, donation: Donation, form: FormGeneration) -> None:
        try:
            donation.open()
            trainer.donate(donation, form)
            donation.close()
            self._page.phase(Phase.IDLE, form.generation, form.committed)
        except Exception as error:
            reason = _why_left(error)
            closed = self._closed >= form.generation
            if reason is None and not closed:
                raise
            lost = reason.rank if isinstance(reason, PeerLost) and not closed else None
            self._report(trainer, form.generation, lost, "closed" if closed else str(reason))

    def _begin(self, form: FormGeneration) -> Session | Donation | None:
        order, generation = self._job.order, form.generation
        with self._lock:
            last, self._session = self._session, None
        if last is not None and not isinstance(last, Joining):
            # Only now: closing earlier would look to peers that still wait as if this rank had died.
            last.close()
        with self._lock:
            if generation <= self._closed:
                return None
            self._page.phase(Phase.FORM, generation, form.committed)
            self._session_of = generation
            self._session = (
                self._donation(form)
                if self._me in form.donors
                else Session(
                    plan=form.plan,
                    profile=order.profile,
                    seat=form.plan.seat_of[self._me],
                    generation=generation,
                    job=order.job,
                    listener=self._listener,
                    addresses=form.addresses,
                    mirrors=order.spec.recovery.mirrors,
                    moves=form.restore.moves if isinstance(form.restore, FromMemory) else (),
                    backend=order.spec.recovery.backend,
                    progress=self._progress,
                    donors=form.donors,
                )
            )
            # Whatever came before is over; nobody waits for a report of it any more.
            self._reported = max(self._reported, Generation(generation - 1))
            return self._session

    def _donation(self, form: FormGeneration) -> Donation:
        return Donation(
            plan=form.plan,
            donors=form.donors,
            me=self._me,
            generation=form.generation,
            job=self._job.order.job,
            listener=self._listener,
            addresses=form.addresses,
            moves=form.restore.moves if isinstance(form.restore, FromMemory) else (),
            progress=self._page,
        )

    def _report(self, trainer: Trainer, generation: Generation, lost: Rank | None, cause: str) -> None:
        # Also of a generation it never began: what it voted for in the one before may be what the answer is about.
        report = replace(trainer.report(generation, lost, cause), stuck=self._stuck)
        faultpoint("before_report")
        self._reported = generation
        self._control.post(said_frame(RankReported(report=report)))
        self._page.phase(Phase.IDLE, generation, report.passed)

    def _say_ready(self, generation: Generation, phases: dict[str, float]) -> None:
        self._control.post(said_frame(RankReady(device=self._me, generation=generation, phases=phases)))
        print(f"{self._me}: generation {generation} ready, {_in_words(phases)}", flush=True)

    # --- control thread ---------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        try:
            poller = select.poll()
            while True:
                poller.register(self._control, select.POLLIN | (select.POLLOUT if self._control.is_backed_up else 0))
                # 200 ms is the longest a backlog made by the training thread goes unnoticed.
                ready = poller.poll(min(200.0, max(0.0, (self._look_at - time.monotonic()) * 1000)))
                self._replace_if_stuck()
                if not ready:
                    continue
                self._control.flush()
                frames, is_open = self._control.receive()
                for kind, body in frames:
                    self._carry_out(read_order(kind, body))
                if not is_open:
                    os._exit(0)  # the host is gone: nobody could ever close, settle or kill this rank
        except BaseException:
            traceback.print_exc()
            os._exit(BROKEN)

    def _carry_out(self, order: ToRank) -> None:
        match order:
            case InjectFault():
                self._take_fault(order.fault)
                return
            case StopAfter(generation=generation):
                self._stop_after = max(self._stop_after, generation)
                return
            case EndJoin(generation=generation):
                with self._lock:
                    self._ended_join = max(self._ended_join, generation)
                if joining := self._joining(generation):
                    joining.end()
                return
            case BeginJoin():
                if any(move.source == self._me for move in order.moves):
                    self._feeds.put(order)
                if not any(move.target == self._me for move in order.moves):
                    return
                if joining := self._joining(order.generation):
                    joining.expect(order)
                    return
            case CloseGeneration(generation=generation):
                with self._lock:
                    self._closed = max(self._closed, generation)
                    session = self._session
                    is_meant = self._session_of <= generation
                if isinstance(session, Joining) and session.of == generation < session.generation:
                    session.end()
                elif session is not None and is_meant:
                    session.abort()
                    self._look_at = time.monotonic() + STUCK_S
            case FormGeneration():
                with self._lock:
                    session = self._session if isinstance(self._session, Joining) else None
                if session is not None:
                    session.abort()  # whatever it waits for, training goes on without it
        self._inbox.put(order)

    def _joining(self, generation: Generation) -> Joining | None:
        with self._lock:
            session = self._session
        return session if isinstance(session, Joining) and session.generation == generation else None

    def _replace_if_stuck(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        with self._lock:
            closed = self._closed
            session = self._session if self._session_of <= closed else None
        if self._reported >= closed or not isinstance(session, Session):
            self._look_at = inf
        elif not session.give_up():
            self._look_at = now + STUCK_S  # it computes; the host kills it if that takes too long
        else:
            self._look_at = inf
            assert self._trains is not None
            if isinstance(self._progress, Relay):
                self._progress.mute()
            self._trains = self._trains.successor(self._own_progress())
            with self._lock:
                self._stuck += 1
            print(f"{self._me}: stuck in a transfer of generation {closed}, another thread takes over", flush=True)
            # What it is told next is the close in the inbox, which is still unanswered.
            threading.Thread(target=self._take_over, name="training", daemon=True).start()

    def _take_fault(self, fault: FaultRequested) -> None:
        if fault.fault in (FaultKind.CUT_LINK, FaultKind.SLOW_LINK):
            with self._lock:
                session = self._session if isinstance(self._session, Session) else None
            self._faults.take_for_links(fault, session)
        else:
            self._faults.take(fault)

    def _drain(self) -> None:
        """Give last words half a second to leave."""
        deadline = time.monotonic() + 0.5
        while self._control.is_backed_up and time.monotonic() < deadline:
            time.sleep(0.005)
            self._control.flush()


def _restored_step(restore: Restore) -> Step:
    match restore:
        case FromSeed():
            return Step(0)
        case FromCheckpoint(checkpoint=checkpoint):
            return checkpoint.step
        case FromMemory(step=step):
            return step


def _why_left(error: BaseException) -> Aborted | PeerLost | NotFormed | Found | None:
    """What ended the generation, through whatever a library wrapped around it; None where the program itself raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Aborted | PeerLost | NotFormed | Found):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _programs_own(error: BaseException) -> BaseException:
    """What the program raised, without what torch's pipelining wrapped around it."""
    while error.__cause__ is not None and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__", "")).startswith("torch."):
            break
        error = error.__cause__
    return error


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the training program called sys.exit({error.code!r}) before the last step"
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"[:1000]


def _in_words(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in phases.items())


def _keep_only(inherited: Inherited) -> None:
    """Close every descriptor that is not this rank's: a forgotten one would keep a dead peer's connection open."""
    low = 3
    for fd in sorted(inherited):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def _write_to(log: int) -> None:
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # every thread's stack, into the log, also while the main thread hangs
