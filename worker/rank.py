"""One training process: a main thread that trains and a control thread that obeys.

It owns the two threads, what they share and how the process ends. It refuses to know what an order means and what a
generation is.

    control thread   form(g) ──> inbox          close(g) ──> session.abort(), then inbox
    main thread      inbox ──> connect, restore, train ──> finished | left: report once ──> inbox ...

A training thread that is stuck in a transfer which no abort can end is given up after STUCK_S: another one takes over what
it knows and holds, reports and goes on, and the old one ends silently when it comes out.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.kinds import speed_of

from .birth import Inherited, Job, settle_in
from .checkpoint.tray import Tray
from .control import Control
from .faultpoints import faultpoint
from .faults import Faults
from .loop import Trainer
from .mail import BROKEN, Channel, Passed, Raised, Said, StandsBy, passed_frame, said_frame
from .member import Member
from .orders import Orders
from .page.writer import PageWriter
from .parallel.device import device_of
from .parallel.guard import Replaced
from .parting import exit_code, in_one_line
from .progress import Progress, Relay
from .warming import warm

_SWITCH_INTERVAL_S = 0.001
_LAST_WORDS_S = 0.5


def main(job: Job, me: Device, inherited: Inherited, zygote: int) -> NoReturn:
    """The forked child, from its first instruction; never returns."""
    code = BROKEN
    try:
        settle_in(inherited, zygote)
        code = _Rank(job, me, inherited).run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Rank:
    def __init__(self, job: Job, me: Device, inherited: Inherited) -> None:
        self._job = job
        self._me = me
        self._channel = Channel(socket.socket(fileno=inherited.control), bell=inherited.bell)
        self._listener = socket.socket(fileno=inherited.listener)
        self._page = _Watched(inherited.page, self._channel)
        os.close(inherited.page)
        self._slots = (inherited.slot, inherited.other_slot)
        self._faults = Faults(self._page, self._say)
        self._orders = Orders(me)
        # The training thread's own, but for handing over.
        self._member: Member | None = None
        self._progress: Progress = self._page
        self._lock = threading.Lock()
        self._stuck = 0

    def run(self) -> int:
        """Train until the training program raises or exits; its exit code. The host ends a rank by a signal."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)  # a close must not wait long for a main thread that computes in Python
        control = Control(self._channel, self._orders, self._faults, self._replace)
        threading.Thread(target=control.run, name="control", daemon=True).start()
        try:
            return self._train()
        except Replaced:
            self._came_out()
            while True:  # the process ends when the thread that has taken over says so
                signal.pause()

    def _train(self) -> int:
        try:
            if self._job.rehearses and self._member is None:
                self._rehearse()
            self._member = self._member or self._first_member()
            self._member.serve()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
            self._say(Raised(message=in_one_line(error)))
            self._drain()
            return exit_code(error)

    def _rehearse(self) -> None:
        """What a first step touches becomes this process's own now, page by page, not when others wait for it."""
        order = self._job.order
        warm(order.spec, order.profile, self._job.program)
        gc.collect()
        gc.freeze()
        self._say(StandsBy())

    def _first_member(self) -> Member:
        order, progress = self._job.order, self._own_progress()
        device = device_of(order.spec.train.device, self._me.index)
        device.activate()
        trainer = Trainer(
            spec=order.spec,
            profile=order.profile,
            program=self._job.program,
            tokens=self._job.tokens,
            me=self._me,
            progress=progress,
            snapshots=Tray(self._slots, self._me, device.torch_device, self._say, self._orders.is_closed),
            device=device.torch_device,
            speed=order.speed or speed_of(order.kind),
        )
        return Member(
            job=self._job,
            me=self._me,
            trainer=trainer,
            orders=self._orders,
            listener=self._listener,
            page=self._page,
            progress=progress,
            faults=self._faults,
            say=self._say,
            num_stuck=lambda: self._stuck,
        )

    def _own_progress(self) -> Progress:
        """The page; where this thread may be replaced, through something that can be muted then."""
        self._progress = Relay(self._page) if self._job.order.spec.recovery.backend == "gloo" else self._page
        return self._progress

    def _say(self, said: Said) -> None:
        self._channel.post(said_frame(said))

    def _drain(self) -> None:
        """Give last words time to leave."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._channel.is_backed_up and time.monotonic() < deadline:
            time.sleep(0.005)
            self._channel.flush()

    # --- a training thread after the first --------------------------------------------------------------------------------

    def _replace(self, closed: Generation) -> None:
        """The training thread is given up; called by the control thread."""
        assert self._member is not None
        if isinstance(self._progress, Relay):
            self._progress.mute()
        self._member = self._member.successor(self._own_progress())
        with self._lock:
            self._stuck += 1
        print(f"{self._me}: stuck in a transfer of generation {closed}, another thread takes over", flush=True)
        # What it is told next is the close in the inbox, which is still unanswered.
        threading.Thread(target=self._take_over, name="training", daemon=True).start()

    def _take_over(self) -> None:
        """The same work as the first one's, and the same end of the process."""
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


class _Watched(PageWriter):
    """The page, and word to the host at each vote that passes: losses would die with this rank.

    The first of a generation ends an incident; the others wake nobody.
    """

    def __init__(self, fd: int, channel: Channel) -> None:
        super().__init__(fd)
        self._channel = channel
        self._passed_in = Generation(0)
        self._computed_s = 0.0

    def computed(self, seconds: float) -> None:
        self._computed_s = seconds

    def passed(self, answer: Answer) -> None:
        super().passed(answer)
        generation = self.generation
        passed = Passed(generation=generation, answer=answer, at=time.time(), computed_s=self._computed_s)
        self._channel.post(passed_frame(passed), droppable=True, quietly=generation == self._passed_in)
        self._passed_in = generation

    def micro_batch(self, number: int) -> None:
        super().micro_batch(number)
        faultpoint("in_compute")
