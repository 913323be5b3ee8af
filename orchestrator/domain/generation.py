"""What the ranks of a closed generation know, and the one recorded answer to what they had committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .ids import Device, Generation, Rank, Step
from .profile import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the weights after a step make of the held-out text."""

    step: Step
    loss: float | None
    """Mean of its tokens; None where that is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of the vote on one step: everything a holder needs to apply the same update."""

    step: Step
    norm: float
    """Global gradient norm before clipping."""
    losses: tuple[float, ...]
    """Mean loss of each micro-batch id, in order of id."""
    maxima: tuple[float, ...] = ()
    """exact mode: the largest absolute value of any micro-batch's gradient, for each group of `exact_groups`; the next
    step's scale is made of it."""
    evaluation: Evaluation | None = None
    """Of the weights that this step began with, where that was due."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """State in a rank's memory: the intervals the plan of `generation` gave it, updated up to and including `step`."""

    generation: Generation
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Intervals that came to a rank before their transfer was over: each whole at `step`, beside whatever it holds."""

    step: Step
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagrees:
    """What this rank has of something differs, to the bit, from what `rank` has of the same: one of the two is wrong.

    state: an interval that one owns and the other mirrors. gradient: of a micro-batch that both computed. memory: `rank` is
    this rank itself, and what it holds is no longer what its last update made.
    """

    rank: Rank
    about: Literal["state", "gradient", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """The vote on a step gave NaN or infinity. micro_batches: whose loss it was; none where only a gradient was."""

    step: Step
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """The checkpoint of this step that training was to be restored from is not what was written, or is not all there; or
    nobody can tell."""

    step: Step
    generation: Generation
    """Whose it is."""
    since: Step = Step(0)
    """The first step of its journal that is no good, or its base's; 0 where only the whole is known to be bad."""
    is_away: bool = False
    """Its storage cannot be reached from here, which says nothing against it."""


Finding: TypeAlias = Disagrees | NotFinite | Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank of a closed generation says, once. A dead rank's is read from its progress page by its host.

    voted: last step it entered the vote for, which means its reduced gradients of that step are complete.
    answer: of the last vote it saw pass, if any in this process, or of the step that a generation of its began with.
    answered_in: the generation whose vote that was; 0 where it was told so; None: an earlier version does not say.
    held: None when it has nothing whole (never restored, torn, or dead).
    arrived: what a transfer that was cut short had brought, as far as `held` does not have it.
    stopped: it left because it was asked to, between two steps.
    lost_peer: the rank whose connection broke, when that is why it left; positive evidence against that rank.
    found: what is wrong with the numbers, when that is why it left.
    stuck: threads of it that nothing gets out of a transfer; its process should be replaced when that costs nothing.
    """

    device: Device
    generation: Generation
    voted: Step
    answer: Answer | None
    held: Held | None
    lost_peer: Rank | None = None
    cause: str = ""
    arrived: Arrived | None = None
    stopped: bool = False
    found: Finding | None = None
    stuck: int = 0
    answered_in: Generation | None = None

    @property
    def passed(self) -> Step:
        return self.answer.step if self.answer else Step(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The recorded answer for a closed generation; its successor starts at step + 1.

    holders: devices whose memory is whole at `step` (or will be once they apply `answer`), with the generation whose
    plan says which intervals those are. is_distrusted: an owner and its mirror disagreed, so nobody's memory counts.
    arrived: intervals at `step` in devices' memory besides.
    """

    generation: Generation
    step: Step
    answer: Answer | None
    holders: tuple[tuple[Device, Generation], ...]
    arrived: tuple[tuple[Device, tuple[Interval, ...]], ...] = ()
    is_distrusted: bool = False
