"""A host's events on their way to a supervisor: numbered, kept until acknowledged, delivered in order.

It owns numbers, the merging of passed steps and who is woken when; it refuses to know where events come from. Votes seen
to pass are routine: they travel with the next urgent event, or at the next tick of the wall clock, as soon as whoever looks
around says what time it is. All hosts tick at once, so that a supervisor takes a job's steps in and records them once, not
once for each host.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import CopiesSeen, Envelope, HostEvent, RankExited, StepsPassed
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.secrecy import Veil

TICK_S = 0.5
"""As long as a supervisor lets a poll wait: the next poll ends with the next tick, not besides."""
FIRST_S = 0.02
"""After a generation's first step, which ends an incident."""
GATHER_S = 0.02
MAX_BATCH = 1000
"""Envelopes in one delivery."""
MAX_ANSWERS = 20_000
"""Passed steps kept in one event while nobody fetches them; beyond it the oldest losses are forgotten."""


@dataclass(frozen=True, slots=True)
class _Kept:
    envelope: Envelope
    added_at: float


class Outbox:
    """Used on one asyncio loop."""

    def __init__(self) -> None:
        self.veil = Veil()
        """Over whatever is told in words: what leaves here is recorded."""
        self._kept: deque[_Kept] = deque()
        self._last_number = 0
        self._delivered = 0
        self._routine: list[tuple[Generation, Answer, float]] = []
        self._seen: dict[Generation, Step] = {}
        self._paces: dict[Device, list[float]] = {}
        self._paces_of = Generation(0)
        self._ticks = 0
        """Of the wall clock, seen so far."""
        self._timer: asyncio.TimerHandle | None = None
        self._gathering: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    def add(self, event: HostEvent, *, gathering: bool = False) -> None:
        """An urgent event: whoever waits gets it now, after the steps that passed before it.

        gathering: or with the next one, at most GATHER_S later, because it says nothing before others of its kind do.
        """
        self._flush_routine()
        self._append(event)
        if not gathering:
            self.wake()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self.wake)

    def add_latest(self, event: CopiesSeen) -> None:
        """In the place of what was seen before, where nobody has fetched that yet."""
        for place in range(len(self._kept) - 1, -1, -1):
            kept = self._kept[place]
            if kept.envelope.number <= self._delivered:
                break
            if isinstance(kept.envelope.event, CopiesSeen):
                self._kept[place] = replace(kept, envelope=replace(kept.envelope, event=event))
                return
        self.add(event)

    def add_passed(self, generation: Generation, answer: Answer, at: float) -> bool:
        """A vote seen to pass; False where another rank of this host has said so already."""
        before = self._seen.get(generation)
        if before is not None and answer.step <= before:
            return False
        self._seen[generation] = answer.step
        for old in sorted(self._seen)[:-4]:
            del self._seen[old]
        self._routine.append((generation, answer, at))
        if before is None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST_S, self._flush_and_wake)
        return True

    def tick(self, now: float) -> None:
        """now: wall clock, s. Steps that passed leave where it has ticked since this was said last."""
        ticks = int(now / TICK_S)
        if ticks != self._ticks and self._routine:
            self._flush_and_wake()
        self._ticks = ticks

    def add_pace(self, generation: Generation, device: Device, computed_s: float) -> None:
        """How long a rank has computed for a micro-batch; it travels with the next steps that passed."""
        if generation != self._paces_of:
            self._paces, self._paces_of = {}, generation
        self._paces.setdefault(device, []).append(computed_s)

    def wake(self) -> None:
        """Have every waiting fetch return."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self._news.set()
        self._news = asyncio.Event()

    async def fetch(self, after: int, timeout_s: float, acked: int | None = None) -> tuple[Envelope, ...]:
        """Events above `after`, waiting up to timeout_s where there are none.

        Those up to `acked` (by default `after`) are forgotten.
        """
        while self._kept and self._kept[0].envelope.number <= (after if acked is None else acked):
            self._kept.popleft()
        if not self._pending(after) and timeout_s > 0:
            with suppress(TimeoutError):
                # Not wait_for: it can swallow a cancellation that comes together with the news.
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        batch = self._pending(after)
        if batch:
            self._delivered = max(self._delivered, batch[-1].envelope.number)
        now = time.monotonic()
        return tuple(_aged(kept, now) for kept in batch)

    def close(self) -> None:
        """Flush what waits for the timer; events stay until they are fetched."""
        self._flush_and_wake()

    def _pending(self, after: int) -> list[_Kept]:
        return [kept for kept in self._kept if kept.envelope.number > after][:MAX_BATCH]

    def _flush_and_wake(self) -> None:
        self._flush_routine()
        self.wake()

    def _flush_routine(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._routine = self._routine, []
        while waiting:
            generation = waiting[0][0]
            same = [item for item in waiting if item[0] == generation]
            waiting = [item for item in waiting if item[0] != generation]
            self._append_steps(
                StepsPassed(
                    generation=generation,
                    answers=tuple(answer for _, answer, _ in same),
                    at=tuple(at for _, _, at in same),
                    paces=self._take_paces(generation),
                )
            )

    def _take_paces(self, generation: Generation) -> dict[Device, float]:
        if generation != self._paces_of:
            return {}
        paces, self._paces = self._paces, {}
        return {device: median(found) for device, found in paces.items()}

    def _append_steps(self, steps: StepsPassed) -> None:
        last = self._kept[-1].envelope if self._kept else None
        # What was delivered once may have been recorded under its number: only an event nobody has seen may still grow.
        if last is not None and last.number > self._delivered and isinstance(last.event, StepsPassed):
            before = last.event
            if before.generation == steps.generation:
                merged = StepsPassed(
                    generation=steps.generation,
                    answers=(before.answers + steps.answers)[-MAX_ANSWERS:],
                    at=(before.at + steps.at)[-MAX_ANSWERS:],
                    paces={**before.paces, **steps.paces},
                )
                self._kept[-1] = replace(self._kept[-1], envelope=replace(last, event=merged))
                return
        self._append(steps)

    def _append(self, event: HostEvent) -> None:
        self._last_number += 1
        if self.veil and not isinstance(event, StepsPassed):
            event = self.veil.over(event)
        self._kept.append(_Kept(Envelope(number=self._last_number, event=event), time.monotonic()))


def _aged(kept: _Kept, now: float) -> Envelope:
    event = kept.envelope.event
    if not isinstance(event, RankExited):
        return kept.envelope
    return replace(kept.envelope, event=replace(event, seconds_ago=event.seconds_ago + now - kept.added_at))
