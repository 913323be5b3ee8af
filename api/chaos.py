"""What users may send about faults on purpose: one fault, or a schedule of many, with what each kind takes.

Mirrors orchestrator.domain.faults; shared by the server, the SDK and the CLI. Knows what is wrong with a request by itself;
whether its rank exists and whether mirrors cover it is found out by those who know the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from orchestrator.domain.codec import decode
from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.faults import ON_CONTROL, ON_RANKS, POINTS, FaultKind, FaultRequested

from .schemas import Real, Request, Text, Whole

KINDS: Mapping[FaultKind, str] = {
    FaultKind.KILL: "a rank is killed (SIGKILL), at once or at a fault point",
    FaultKind.STOP: "a rank is stopped (SIGSTOP) and goes on after duration_s",
    FaultKind.SLOW: "a rank computes factor times slower for duration_s",
    FaultKind.EXIT: "a rank's training program exits with exit_code",
    FaultKind.RAISE: "a rank's training program raises",
    FaultKind.GIL_HANG: "a rank hangs in C code that holds the interpreter's lock for duration_s",
    FaultKind.NAN: "a rank's gradient becomes NaN",
    FaultKind.BIT_FLIP: "one bit of the state a rank holds flips",
    FaultKind.CUT_LINK: "a node's links to other nodes carry nothing for duration_s",
    FaultKind.SLOW_LINK: "a node's links to other nodes carry factor bytes per second each for duration_s",
    FaultKind.NODE_KILL: "every process of a node is killed",
    FaultKind.HOST_KILL: "a job's host on a node is killed, and its ranks with it",
    FaultKind.ZYGOTE_KILL: "the process that ranks are forked from is killed on a node",
    FaultKind.SUPERVISOR_KILL: "the supervisor is killed",
    FaultKind.REDIS_STALL: "Redis answers nobody for duration_s",
    FaultKind.CLOCK_JUMP: "the supervisor's wall clock jumps by jump_s",
}
_SEATS = ("rank", "device", "pipeline", "stage", "tp")
_DURATIONS = frozenset(
    {
        FaultKind.STOP,
        FaultKind.SLOW,
        FaultKind.GIL_HANG,
        FaultKind.CUT_LINK,
        FaultKind.SLOW_LINK,
        FaultKind.REDIS_STALL,
    }
)
Kind = Literal[
    "kill", "stop", "slow", "exit", "raise", "gil_hang", "nan", "bit_flip", "cut_link", "slow_link", "node_kill",
    "host_kill", "zygote_kill", "supervisor_kill", "redis_stall", "clock_jump",
]  # fmt: skip
KindAsked = Literal[
    "kill", "stop", "slow", "exit", "raise", "gil_hang", "nan", "bit_flip", "cut_link", "slow_link", "node_kill",
    "host_kill", "zygote_kill", "supervisor_kill", "redis_stall", "clock_jump", "kill_rank", "kill_node",
]  # fmt: skip
Point = Annotated[Text, Field(json_schema_extra={"allowed": ", ".join(POINTS)})]
DeviceName = Annotated[str, Field(pattern=r"^.+/\d+$", max_length=255, json_schema_extra={"allowed": "node/index"})]
Place = Annotated[Whole, Field(ge=0, le=10**6)]


class FaultRequest(Request):
    """Whom: rank, device, node, pipeline, stage or tp narrow it down, and `seed` picks one of those that are left.

    kill_rank and kill_node are what `kill` and `node_kill` were called first: they ask nobody whether mirrors cover it.
    """

    kind: KindAsked
    job: Text | None = None
    rank: Place | None = None
    device: DeviceName | None = None
    node: Text | None = None
    pipeline: Place | None = None
    stage: Place | None = None
    tp: Place | None = None
    at: Point | None = None
    step: Annotated[Whole, Field(ge=0, le=10**9)] = 0
    duration_s: Annotated[Real, Field(ge=0, le=86400)] = 0.0
    factor: Annotated[Real, Field(ge=0, le=1e12)] = 0.0
    jump_s: Annotated[Real, Field(ge=-1e8, le=1e8)] = 0.0
    exit_code: Annotated[Whole, Field(ge=0, le=255)] = 1
    seed: Annotated[Whole, Field(ge=0, le=2**53 - 1)] = 0
    beyond_mirrors: Annotated[bool, Field(strict=True)] = False

    def checked(self) -> Self:
        """Raises Refused where a field its kind needs is missing, or one it does not take is there."""
        needs, takes = fields_of(self.kind)
        for name in sorted(needs - self.model_fields_set):
            self._refuse(name, f"{self.kind} needs {name}")
        for name in sorted(self.model_fields_set - takes - needs):
            if getattr(self, name) not in (None, type(self).model_fields[name].default):
                self._refuse(name, f"{self.kind} takes no {name}, only {' and '.join(sorted((needs | takes) - {'kind'}))}")
        if self.kind == "node_kill" and not (self.job or self.node):
            self._refuse("node", "node_kill needs node, or job to pick one of its nodes")
        if self.at is not None and self.at not in POINTS:
            self._refuse("at", f"at is {self.at!r}: must be one of {', '.join(POINTS)}")
        return self

    def to_command(self) -> FaultRequested:
        """Raises Refused."""
        given = self.checked().model_dump(exclude_none=True, exclude={"kind"})
        named = "kill" if self.kind == "kill_rank" else "node_kill" if self.kind == "kill_node" else self.kind
        old = {"beyond_mirrors": True} if named != self.kind else {}
        asked = decode(FaultRequested, {"$": "FaultRequested", "fault": named, **given, **old})
        assert isinstance(asked, FaultRequested)
        return asked

    def _refuse(self, name: str, message: str) -> None:
        raise Refused(message, (FieldProblem(field=name, value=getattr(self, name), message=message),))


def fields_of(kind: str) -> tuple[frozenset[str], frozenset[str]]:
    """Fields a kind needs, and those it takes besides."""
    if kind == "kill_rank":
        return frozenset({"kind", "job", "rank"}), frozenset()
    if kind == "kill_node":
        return frozenset({"kind", "node"}), frozenset()
    fault = FaultKind(kind)
    takes = {"seed", "beyond_mirrors"} | ({"duration_s"} if fault in _DURATIONS else set())
    takes |= {"factor"} if fault in (FaultKind.SLOW, FaultKind.SLOW_LINK) else set()
    takes |= {"exit_code"} if fault is FaultKind.EXIT else set()
    if fault in ON_CONTROL:
        jump = {"jump_s"} if fault is FaultKind.CLOCK_JUMP else set()
        return frozenset({"kind", *jump}), frozenset({*takes, "job"})
    takes |= {"node", *_SEATS}
    if fault in ON_RANKS:
        return frozenset({"kind", "job"}), frozenset({*takes, "at", "step"})
    return frozenset({"kind"} if fault is FaultKind.NODE_KILL else {"kind", "job"}), frozenset({*takes, "job"})


def words_of(asked: FaultRequested) -> str:
    whom = [f"{name} {value}" for name in ("node", *_SEATS) if (value := getattr(asked, name)) is not None]
    where = f" at {asked.at}" if asked.at else ""
    after = f" from step {asked.step}" if asked.step else ""
    of = f" of {asked.job}" if asked.job else ""
    return f"{asked.fault} of {', '.join(whom) or 'one that the seed picks'}{of}{where}{after}"


# --- many ----------------------------------------------------------------------------------------------------------------


class Schedule(Request):
    """Faults over time: those in `faults`, in order, or `num_faults` drawn from `kinds` by weight; all from one seed.

    rate_per_minute: mean of random intervals. at_once: faults whose verdict is open, at most. regrow_s: after a node was
    killed, another of its kind is added; 0 for never.
    """

    seed: Annotated[Whole, Field(ge=0, le=2**53 - 1)] = 0
    faults: Annotated[tuple[dict[str, Any], ...], Field(max_length=100_000)] = ()
    """Fault requests without `job`; with `step` each waits for that step."""
    kinds: Annotated[dict[Kind, Annotated[Real, Field(gt=0, le=1e6)]], Field(max_length=64)] = Field(
        default_factory=lambda: dict(DEFAULT_KINDS)
    )
    num_faults: Annotated[Whole, Field(ge=1, le=100_000)] = 20
    rate_per_minute: Annotated[Real, Field(gt=0, le=6000)] = 12.0
    at_points: Annotated[Real, Field(ge=0, le=1)] = 0.5
    """Share of kills that wait for a random fault point."""
    duration_s: Annotated[Real, Field(ge=0, le=604800)] = 0.0
    """Nothing new after that long; 0 for no limit."""
    longest_s: Annotated[Real, Field(gt=0, le=3600)] = 1.0
    """The longest a drawn fault lasts that ends by itself."""
    at_once: Annotated[Whole, Field(ge=1, le=64)] = 2
    regrow_s: Annotated[Real, Field(ge=0, le=86400)] = 5.0
    release: Annotated[bool, Field(strict=True)] = True
    """Nodes whose devices are kept out for good, because this job was given wrong numbers by them twice, are released."""
    beyond_mirrors: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.faults and {"kinds", "num_faults"} & self.model_fields_set:
            raise ValueError("takes faults, or kinds and num_faults, not both")
        return self


DEFAULT_KINDS: Mapping[Kind, float] = {
    "kill": 10,
    "stop": 2,
    "slow": 2,
    "slow_link": 1,
    "cut_link": 1,
    "node_kill": 1,
    "host_kill": 1,
    "zygote_kill": 1,
    "supervisor_kill": 1,
    "redis_stall": 1,
    "clock_jump": 1,
}
"""Those from which every job recovers by itself."""
