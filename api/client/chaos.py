"""A schedule of faults carried out on a job through the API, and what came of it as a report that can be replayed.

    draw -> wait for its turn (step, interval, faults still open) -> inject -> read verdicts -> report

It owns the order of faults and the arithmetic of the report. It never judges a fault: verdicts are the supervisor's. One
seed gives one sequence of requests; where in a run each strikes depends on the machine, so a report notes it for `replay`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from api.chaos import FaultRequest, Schedule
from api.schemas import read
from api.views import FaultView, JobView, StepView, View
from orchestrator.domain.faults import AROUND_A_SNAPSHOT, IN_THE_NEXT_PROCESS, POINTS

from .client import Client
from .errors import ApiError, Unreachable

POLL_S = 0.2
VERDICTS_S = 60.0
"""For what is still open when the last fault has been asked for."""
MAX_DRAWS = 3
"""For each fault wanted."""
CURVE_TOLERANCE = 1e-5
AFTER_LEAVING = frozenset({*IN_THE_NEXT_PROCESS, "before_report", "after_report"})
"""Points that only a recovery reaches: drawn faults there could wait for ever."""
NOT_DRAWN = AFTER_LEAVING | AROUND_A_SNAPSHOT | {"in_evaluation"}
"""Those, and points that a job may have no step for: nobody need save or evaluate anything."""


class ReportView(View):
    """What a run of faults came to. `faults` hold their requests: a report is a schedule too."""

    job: str
    status: str
    seed: int
    num_faults: int
    kinds: dict[str, int]
    verdicts: dict[str, int]
    points: dict[str, int]
    pauses_s: tuple[float, ...]
    steps: int
    steps_rolled_back: int
    steps_again: int
    """Steps committed more than once, after a rollback."""
    curve_equal: bool | None
    """To the twin where there is one, else of steps committed twice; None where nothing could be compared."""
    largest_gap: float | None
    """Relative, of those losses."""
    steps_lost: int
    """Steps of which no commit was recorded."""
    steps_doubled: int
    """Steps recorded again without a rollback before."""
    goodput: float | None
    """Undisturbed time of the committed steps, over the wall time they took."""
    faults: tuple[FaultView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Progress, for people: what has just happened, and the fault it is about."""

    message: str
    fault: FaultView | None = None


Tell = Callable[[Said], None]


class Chaos:
    """One run. Raises ApiError (403 where the server has faults off), Unreachable where nobody answers for long."""

    def __init__(self, client: Client, job: str, schedule: Schedule, tell: Tell = lambda _: None) -> None:
        self._client = client
        self._job = job
        self._schedule = schedule
        self._tell = tell
        self._random = Random(schedule.seed)
        self._asked: list[str] = []
        self._seen: dict[str, FaultView] = {}
        self._regrow: list[tuple[float, str, int]] = []

    def run(self) -> ReportView:
        """Until every fault has its verdict, or the job is over."""
        deadline = time.monotonic() + self._schedule.duration_s if self._schedule.duration_s else None
        for request, pause_s in self._requests():
            if not self._wait_for_turn(request, pause_s, deadline):
                break
            self._inject(request)
        self._wait_for_verdicts()
        return self.report()

    def tend(self, until: Callable[[], bool]) -> None:
        """Give back what faults took, nodes and devices, for as long as somebody else is not through with the job."""
        while not until():
            self._look()
            self._grow_back(time.monotonic())
            self._release()
            time.sleep(POLL_S)

    def report(self, twin: Sequence[StepView] = ()) -> ReportView:
        self._look()
        job = self._client.job(self._job)
        steps = list(self._client.all_metrics(self._job))
        found = [self._seen[name] for name in self._asked if name in self._seen]
        return make_report(job, steps, found, seed=self._schedule.seed, twin=twin)

    # --- what next ----------------------------------------------------------------------------------------------------

    def _requests(self) -> Iterator[tuple[FaultRequest, float]]:
        """Each request and the seconds to wait before it."""
        schedule, random = self._schedule, self._random
        if schedule.faults:
            for given in schedule.faults:
                yield read(FaultRequest, {"job": self._job, **given}), 0.0
            return
        # What never happened does not count, within reason: one that mirrors never cover must come to an end too.
        for _ in range(MAX_DRAWS * schedule.num_faults):
            if self._num_counted >= schedule.num_faults:
                self._wait_for_verdicts()
                if self._num_counted >= schedule.num_faults:
                    return
            yield draw(random, schedule, self._job), random.expovariate(schedule.rate_per_minute / 60)

    @property
    def _num_counted(self) -> int:
        """Faults that have happened, or still may."""
        return len(self._asked) - sum(not view.is_open and not _has_happened(view) for view in self._seen.values())

    def _wait_for_turn(self, request: FaultRequest, pause_s: float, deadline: float | None) -> bool:
        """Whether it comes: not where the job ends before."""
        due = time.monotonic() + pause_s
        while True:
            now = time.monotonic()
            if deadline is not None and now > deadline:
                return False
            self._grow_back(now)
            self._release()
            still_open = self._look()
            job = self._client.job(self._job)
            if job.is_over:
                return False
            is_its_step = not request.step or job.step >= request.step - 1
            is_quiet = still_open < self._schedule.at_once and (still_open or job.status == "RUNNING")
            if now >= due and is_its_step and is_quiet and not self._regrow:
                return True
            time.sleep(POLL_S)

    def _inject(self, request: FaultRequest) -> None:
        try:
            accepted = self._client.inject(request)
        except (ApiError, Unreachable) as error:
            if isinstance(error, ApiError) and error.status in (403, 422):
                raise
            self._tell(Said(message=f"{request.kind}: not now, {error}"))
            return
        self._asked.append(accepted.fault)
        self._tell(Said(message=accepted.message))

    # --- what became of it --------------------------------------------------------------------------------------------

    def _look(self) -> int:
        """Take in new verdicts; how many faults are open."""
        still_open = 0
        for view in self._client.faults(self._job):
            if view.id not in self._asked:
                continue
            before = self._seen.get(view.id)
            self._seen[view.id] = view
            still_open += view.is_open
            if not view.is_open and (before is None or before.is_open):
                self._tell(Said(message=f"{view.kind}: {view.verdict.replace('_', ' ')}, {view.why}", fault=view))
            if view.kind == "node_kill" and view.node and view.verdict != "refused" and before is None:
                self._plan_regrowth(view.node)
        return still_open

    def _plan_regrowth(self, node: str) -> None:
        lost = next((found for found in self._client.nodes() if found.id == node), None)
        if lost is not None and self._schedule.regrow_s:
            self._regrow.append((time.monotonic() + self._schedule.regrow_s, lost.kind, lost.num_devices))

    def _grow_back(self, now: float) -> None:
        for due, kind, num_devices in list(self._regrow):
            if now >= due:
                self._regrow.remove((due, kind, num_devices))
                self._client.add_node(kind, num_devices)
                self._tell(Said(message=f"a {kind} node with {num_devices} devices is added for the one that was killed"))

    def _release(self) -> None:
        """Devices that wrong numbers on purpose have kept out for good: the operator who vouches for them is us."""
        if not self._schedule.release:
            return
        for node in self._client.nodes():
            held = [one for one in node.quarantine if one.standing == "held" and one.job == self._job]
            if held:
                self._client.release_node(node.id)
                self._tell(Said(message=f"{', '.join(one.device for one in held)} released: {held[0].reason}"))

    def _wait_for_verdicts(self) -> None:
        deadline = time.monotonic() + VERDICTS_S
        while (self._look() or self._regrow) and time.monotonic() < deadline:
            self._grow_back(time.monotonic())
            self._release()
            time.sleep(POLL_S)


# --- drawing -------------------------------------------------------------------------------------------------------------


def draw(random: Random, schedule: Schedule, job: str) -> FaultRequest:
    """One random fault. The same numbers are drawn for every kind, so that weights alone change a sequence."""
    kinds = sorted(schedule.kinds)
    kind = random.choices(kinds, [schedule.kinds[name] for name in kinds])[0]
    point = random.choice([name for name in POINTS if name not in NOT_DRAWN])
    waits, seed = random.random() < schedule.at_points, random.randrange(1 << 32)
    seconds, jump_s = round(random.uniform(0.1, schedule.longest_s), 2), random.choice((-90.0, -3.0, 3.0, 90.0))
    body: dict[str, Any] = {"kind": kind, "job": job, "seed": seed}
    if kind == "kill" and waits:
        body["at"] = point
    if kind in ("stop", "slow", "gil_hang", "cut_link", "slow_link", "redis_stall"):
        body["duration_s"] = seconds
    if kind == "clock_jump":
        body["jump_s"] = jump_s
    if kind == "slow_link":
        body["factor"] = 2e6
    if schedule.beyond_mirrors:
        body["beyond_mirrors"] = True
    return read(FaultRequest, body)


def replay_of(report: ReportView) -> Schedule:
    """The same faults, on the same devices and at the same steps as far as the run allows."""
    return read(Schedule, {"seed": report.seed, "faults": [_again(view) for view in report.faults]})


def _again(view: FaultView) -> dict[str, Any]:
    given = {name: value for name, value in view.asked.items() if name not in ("job", "fault")}
    if view.devices and view.node is None:
        given = {name: value for name, value in given.items() if name not in ("rank", "node", "pipeline", "stage", "tp")}
        given["device"] = view.devices[0]
        given["step"] = view.step
    return {"kind": view.kind, **given}


# --- the report ----------------------------------------------------------------------------------------------------------


def make_report(
    job: JobView, steps: Sequence[StepView], faults: Sequence[FaultView], *, seed: int, twin: Iterable[StepView] = ()
) -> ReportView:
    gaps = list(_gaps(steps, {step.step: step.loss for step in twin}))
    lost, doubled, again = ledger(steps, job.step)
    carried_out = [view for view in faults if _has_happened(view)]
    return ReportView(
        job=job.id,
        status=job.status,
        seed=seed,
        num_faults=len(carried_out),
        kinds=dict(Counter(view.kind for view in carried_out)),
        verdicts=dict(Counter(view.verdict for view in faults)),
        points=dict(Counter(view.at for view in carried_out if view.at)),
        pauses_s=tuple(view.pause_s for view in carried_out if view.pause_s is not None),
        steps=job.step,
        steps_rolled_back=sum(incident.rolled_back for incident in job.incidents),
        steps_again=again,
        curve_equal=all(gap <= CURVE_TOLERANCE for gap in gaps) if gaps else None,
        largest_gap=max(gaps, default=None),
        steps_lost=lost,
        steps_doubled=doubled,
        goodput=_goodput(job, steps),
        faults=tuple(faults),
    )


def ledger(steps: Sequence[StepView], committed: int) -> tuple[int, int, int]:
    """Of 1..committed: steps never recorded, recorded again without a rollback before, and recorded again after one.

    A step's samples are a pure function of the seed and its number, so each sample id counts once where its step does.
    """
    seen: set[int] = set()
    doubled = again = at = 0
    generation = 0
    for one in steps:
        if one.step <= at:
            # Going back is a rollback, which only another generation can begin with.
            doubled += one.generation <= generation
        again += one.step in seen
        seen.add(one.step)
        at, generation = one.step, one.generation
    return len(set(range(1, committed + 1)) - seen), doubled, again


def kept(steps: Iterable[StepView]) -> list[StepView]:
    """The commits that count: of a step that was rolled back and run again, the last one."""
    found: list[StepView] = []
    for one in steps:
        if found and one.step <= found[-1].step and one.generation > found[-1].generation:
            found = [earlier for earlier in found if earlier.step < one.step]
        found.append(one)
    return found


def _has_happened(view: FaultView) -> bool:
    return view.carried_out_at is not None and view.verdict != "refused"


def _gaps(steps: Sequence[StepView], twin: Mapping[int, float | None]) -> Iterator[float]:
    """Relative differences of losses that should be equal: to the twin's, else of steps committed twice."""
    first: dict[int, float] = {}
    for one in kept(steps) if twin else steps:
        wanted = twin.get(one.step) if twin else first.get(one.step)
        if one.loss is None:
            continue
        if wanted is not None:
            yield abs(one.loss - wanted) / max(abs(wanted), 1e-12)
        first[one.step] = one.loss


def _goodput(job: JobView, steps: Sequence[StepView]) -> float | None:
    if len(steps) < 2 or not job.typical_step_s:
        return None
    wall_s = (steps[-1].at - steps[0].at).total_seconds()
    return min(1.0, (len({one.step for one in steps}) - 1) * job.typical_step_s / wall_s) if wall_s > 0 else None
