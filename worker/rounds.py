"""What a host looks at several times a second, whether or not anybody asks: its ranks, their copies, and who speaks to it.

    look ──> a stall is told            ranks that do not move            (lookout.py)
        ──> ranks are ended            no supervisor has spoken for long (isolation.py)
        ──> understudies are forked    the generation has trained a while
        ──> copies, steps, log times   are told and noted

It owns when these are due and what they have seen. It refuses to know requests; what a rank says is told to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from orchestrator.domain.host_events import RanksSeen, RanksStalled
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.requests import LookAround, OpenHost

from .checkpoint.dispatch import Dispatch
from .copies import EVERY_S as COPIES_EVERY_S
from .copies import Copies
from .crew import Crew
from .isolation import Isolation
from .logtimes import LogTimes
from .lookout import Lookout
from .outbox import Outbox

AHEAD_S = 2.0
"""After a generation's first step; what is forked then takes processors from nobody who waits."""
_ISOLATION_S = 0.5


class Rounds:
    """Used on one asyncio loop.

    under_way: the generation that ranks were told to form and not to leave; 0 for none. forsaken: nobody has spoken to this
    host for so long that nobody counts on it any more.
    """

    def __init__(
        self,
        order: OpenHost,
        crew: Crew,
        dispatch: Dispatch,
        outbox: Outbox,
        *,
        grace_s: float,
        under_way: Callable[[], Generation],
        forsaken: Callable[[], None],
    ) -> None:
        recovery = order.spec.recovery
        self._crew = crew
        self._dispatch = dispatch
        self._outbox = outbox
        self._under_way = under_way
        self._forsaken = forsaken
        self._max_isolation_s = recovery.max_isolation_s
        # Memory of a device is for who trains on it.
        self._forks_ahead = order.spec.train.device != "cuda"
        self._first_step = Generation(0), 0.0
        """The newest generation that has committed one here, and when."""
        self._seated: tuple[Device, ...] = ()
        """Devices here that have a seat in the newest plan."""
        now = time.monotonic()
        self._isolation = Isolation(heard_at=now, moved_at=now, grace_s=grace_s)
        self._lookout = Lookout(
            tells_waits=recovery.backend == "links", waits_inside=recovery.backend == "nccl", hang_s=recovery.hang_s
        )
        self._copies = Copies()
        self._copies_due = 0.0
        self._log_times = LogTimes()
        self._next: asyncio.TimerHandle | None = None

    @property
    def lookout(self) -> Lookout:
        return self._lookout

    # --- what is told to it -----------------------------------------------------------------------------------------------

    def heard(self) -> None:
        """A supervisor has spoken."""
        self._isolation.hear(time.monotonic())

    def formed(self, generation: Generation, seated: tuple[Device, ...]) -> None:
        """seated: devices here that have a seat in it."""
        self._lookout.begin(generation)
        self._seated = seated
        if not seated:
            self._crew.fork_ahead(())  # no step of this generation will pass here that would begin it
        self.moved()

    def moved(self) -> None:
        self._isolation.move(time.monotonic())

    def passed(self, generation: Generation) -> None:
        """A rank has seen a vote pass."""
        if generation > self._first_step[0]:
            self._first_step = generation, time.monotonic()

    def committed(self) -> None:
        """It was the first one here to see that step pass."""
        self._isolation.commit(time.monotonic())

    # --- looking ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._go()

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def look_around(self, asked: LookAround) -> None:
        """Tell what is seen now."""
        at, since_s = self._crew.at, self._lookout.looked_s_ago
        if (stalled := self._look()) is not None:
            self._outbox.add(stalled)
        self._outbox.add(
            RanksSeen(
                generation=asked.generation, number=asked.number, sights=self._lookout.sights(at), looked_s_ago=since_s
            )
        )

    def _go(self) -> None:
        try:
            self._crew.listen()
            if (stalled := self._look()) is not None:
                self._outbox.add(stalled)
            if time.monotonic() - (self._isolation.judged_at or 0.0) >= _ISOLATION_S:
                self._judge_isolation()
            self._look_at_copies(time.monotonic())
            self._fork_ahead()
            self._outbox.tick(time.time())
            self._log_times.note((seat.log for seat in self._crew.at.values()), time.time())
        finally:
            # At round times, so that a look and a tick are one wake-up.
            again_s = self._lookout.look_again_s
            again_s -= time.time() % again_s
            self._next = asyncio.get_running_loop().call_later(again_s, self._go)

    def _look(self) -> RanksStalled | None:
        # Whoever does not leave a closed generation is another rule's.
        return self._lookout.look(self._crew.at if self._under_way() else {})

    def _judge_isolation(self) -> None:
        now, allowed_s = time.monotonic(), self._max_isolation_s
        verdict = self._isolation.judge(now, allowed_s)
        for seat in self._crew.seats if verdict else ():
            assert verdict is not None
            if not (seat.is_finished and verdict.spares_finished):
                seat.kill(verdict.reason)
        if self._isolation.is_forsaken(now, allowed_s):
            self._forsaken()

    def _look_at_copies(self, now: float) -> None:
        if now < self._copies_due:
            return
        self._copies_due = now + COPIES_EVERY_S
        if (seen := self._copies.look(now, self._crew.at, self._dispatch.under_way())) is not None:
            self._outbox.add_latest(seen)

    def _fork_ahead(self) -> None:
        """Once a generation trains and has trained for a moment, who would replace its ranks is made ready."""
        generation, at = self._first_step
        if self._forks_ahead and generation and generation == self._under_way() and time.monotonic() - at > AHEAD_S:
            # By the plan, not by who lives: of a rank that has just ended the understudy is about to be needed.
            self._crew.fork_ahead(self._seated)
