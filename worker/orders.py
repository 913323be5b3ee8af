"""What a rank has been told and how far it has answered: the one thing its control thread and its training thread share.

It owns the order of things between the two: a close may overtake a form, and an order may come for a session that has not
begun or is over. It refuses to know how orders arrive and what a session does.

    control thread    form | begin_join | put ──> inbox      close, end_join ──> the session that is open, then inbox
    training thread   inbox ──> begin(g) | begin_joining ──> session, or nothing where it was closed before it began
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from orchestrator.domain.checkpoint import Pacing
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.requests import BeginJoin, CloseGeneration, FormGeneration, SaveSoon, SetPacing

from .donation import Donation
from .joining import Joining
from .mail import StandBy
from .session import Session

ToTrain: TypeAlias = FormGeneration | CloseGeneration | BeginJoin | StandBy
"""What the training thread answers, one after the other."""


class Orders:
    def __init__(self, me: Device) -> None:
        self._me = me
        self._inbox: queue.SimpleQueue[ToTrain] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Under the lock: both threads ask whether the session that is about to begin was closed before it began.
        self._closed = Generation(0)
        self._session: Session | Donation | Joining | None = None
        self._session_of = Generation(0)
        self._feeds: queue.SimpleQueue[BeginJoin] = queue.SimpleQueue()
        """Newcomers to give state to, from the control thread to the training loop."""
        self._stop_after = Generation(0)
        self._save_soon = Generation(0)
        self._rest = Generation(0)
        self._pacing: SetPacing | None = None
        self._ended_join = Generation(0)
        self.reported = Generation(0)
        """The last generation that needs no report any more; the training thread's own, but for handing over."""

    # --- training thread --------------------------------------------------------------------------------------------------

    def next(self) -> ToTrain:
        """Waits for it; ends with the process, because the host ends it or the control thread does."""
        return self._inbox.get()

    def begin(self, generation: Generation, make: Callable[[], Session | Donation]) -> Session | Donation | None:
        """Let the last session go and open what `make` gives to closes; None where this generation is closed already."""
        with self._lock:
            last, self._session = self._session, None
        if last is not None and not isinstance(last, Joining):
            # Only now: closing earlier would look to peers that still wait as if this rank had died.
            last.close()
        with self._lock:
            if generation <= self._closed:
                return None
            self._session_of = generation
            session = self._session = make()
            # Whatever came before is over; nobody waits for a report of it any more.
            self.reported = max(self.reported, Generation(generation - 1))
            return session

    def begin_joining(self, joining: Joining) -> bool:
        """Open it to closes and ends; False where it came too late."""
        with self._lock:
            if joining.generation <= max(self._closed, self._session_of):
                return False
            self._session, self._session_of = joining, joining.generation
            if joining.generation <= self._ended_join:
                joining.end()
        return True

    def end_joining(self, joining: Joining) -> bool:
        """It has run; whether it ended as it was told to, rather than aborted."""
        with self._lock:
            self._session = None
            return not joining.is_aborted

    def is_closed(self, generation: Generation) -> bool:
        return self._closed >= generation

    def is_to_stop(self, generation: Generation) -> bool:
        """This rank was asked to stop after a step of this generation."""
        return self._stop_after >= generation

    def take_save(self, generation: Generation) -> bool:
        """This rank was asked to have a step of this generation saved, and has not told the others yet: now it does."""
        is_asked = self._save_soon == generation
        if is_asked:
            self._save_soon = Generation(0)
        return is_asked

    def is_to_rest(self, generation: Generation) -> bool:
        """This rank was asked to have a step of this generation saved that no other follows."""
        return self._rest >= generation

    def take_pacing(self, generation: Generation) -> Pacing | None:
        """What this rank was told of this generation's checkpoints, and has not told the others yet: now it does."""
        order = self._pacing
        if order is None or order.generation != generation:
            return None
        self._pacing = None
        return order.pacing

    def feeds(self, generation: Generation) -> Iterator[BeginJoin]:
        """Newcomers to begin to give state to in this generation, each once."""
        while not self._feeds.empty():
            begin = self._feeds.get()
            if begin.of == generation:
                yield begin

    # --- control thread ---------------------------------------------------------------------------------------------------

    def put(self, order: ToTrain) -> None:
        """Have the training thread answer it after what it is doing."""
        self._inbox.put(order)

    def form(self, order: FormGeneration) -> None:
        with self._lock:
            session = self._session if isinstance(self._session, Joining) else None
        if session is not None:
            session.abort()  # whatever it waits for, training goes on without it
        self.put(order)

    def close(self, order: CloseGeneration) -> bool:
        """End what is open of this generation or an earlier one; whether something was aborted."""
        with self._lock:
            self._closed = max(self._closed, order.generation)
            session = self._session
            is_meant = self._session_of <= order.generation
        is_aborted = False
        if isinstance(session, Joining) and session.of == order.generation < session.generation:
            session.end()
        elif session is not None and is_meant:
            session.abort()
            is_aborted = True
        self.put(order)
        return is_aborted

    def stop_after(self, generation: Generation) -> None:
        self._stop_after = max(self._stop_after, generation)

    def save_soon(self, order: SaveSoon) -> None:
        if order.device == self._me and order.rests:
            self._rest = order.generation
        elif order.device == self._me:
            self._save_soon = order.generation

    def set_pacing(self, order: SetPacing) -> None:
        if order.device == self._me:
            self._pacing = order

    def begin_join(self, order: BeginJoin) -> None:
        """Feed newcomers, receive as one, or expect what a donor's successor gives; what of it this rank is meant by."""
        if any(move.source == self._me for move in order.moves):
            self._feeds.put(order)
        if not any(move.target == self._me for move in order.moves):
            return
        if joining := self._joining(order.generation):
            joining.expect(order)
        else:
            self.put(order)

    def end_join(self, generation: Generation) -> None:
        with self._lock:
            self._ended_join = max(self._ended_join, generation)
        if joining := self._joining(generation):
            joining.end()

    def session(self) -> Session | None:
        """The one that is open, where it is one of training."""
        with self._lock:
            return self._session if isinstance(self._session, Session) else None

    def unanswered(self) -> tuple[Generation, Session] | None:
        """What was closed last and its session, where the training thread has not reported yet."""
        with self._lock:
            closed = self._closed
            session = self._session if self._session_of <= closed else None
        if self.reported >= closed or not isinstance(session, Session):
            return None
        return closed, session

    def _joining(self, generation: Generation) -> Joining | None:
        with self._lock:
            session = self._session
        return session if isinstance(session, Joining) and session.generation == generation else None
