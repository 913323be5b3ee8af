"""Whether what a rank holds and computes is right, as far as a second copy can tell: hashes of the two are compared.

    state      checksums of what all own, less those of what all mirror ──> in every vote, which passes only where it is 0
               owner ── hash of what it owns, after the update ──> mirror, which has its own hash of the same intervals
    memory     checksum right after an update, and before the next vote: who is to blame is known then
    gradient   pipeline p, first id ── hash ──> pipeline p', which has computed that id a second time

It owns when to compare and what to make of a difference. Which of the two is wrong it cannot know; it refuses to know what
becomes of them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from orchestrator.domain.generation import Disagrees
from orchestrator.domain.ids import Rank, Step
from orchestrator.domain.plan import Pipeline, Plan
from orchestrator.domain.spec import RecoverySpec

from .digest import checksum, digest
from .findings import Corrupted
from .parallel.data import Session
from .state.buffers import Buffers
from .state.holdings import Holdings

_HALF = 1 << 32


@dataclass(frozen=True, slots=True)
class _Noted:
    step: Step
    sums: torch.Tensor
    """Of what is owned and of what is mirrored."""


class Copies:
    """Owner against mirror, and each against its own memory, in one generation.

    At every vote by checksums, which travel in it; `compare`, by hashes, is called by every rank after the same steps.
    """

    NUM_ENTRIES = 3
    """Of a ballot: ranks whose memory has changed, and the halves of all owners' checksums less all mirrors'."""

    def __init__(self, session: Session, recovery: RecoverySpec) -> None:
        self._session = session
        self._every = recovery.compare_every
        self._mirrored = session.mirror_of is not None or session.mirrored is not None
        self._noted: _Noted | None = None
        self._strange: Step | None = None

    def note(self, held: Holdings) -> None:
        """Its bits are right now: nothing but an update may change them."""
        self._noted = _Noted(held.step, _checksums(held))

    def ballot(self, held: Holdings) -> torch.Tensor:
        """(3,) float64 on CPU; summed over all ranks exactly, as integers below 2**53."""
        sums = _checksums(held)
        changed = self._noted is None or self._noted.step != held.step or not torch.equal(self._noted.sums, sums)
        owned, mirrored = sums.tolist()
        owned = owned if self._session.mirror_of is not None else 0
        mirrored = mirrored if self._session.mirrored is not None else 0
        low, high = owned % _HALF - mirrored % _HALF, (owned >> 32) - (mirrored >> 32)
        return torch.tensor([changed, low, high], dtype=torch.float64)

    def agree(self, total: torch.Tensor, held: Holdings, step: Step) -> bool:
        """Whether everybody's ballots say that all memory is what it was; where not, `step` is not to be committed.

        All ranks see the same. Who is to blame, as far as one can tell, raises Corrupted and leaves; the others run the
        step again until they are told. Raises Aborted, PeerLost.
        """
        num_changed, *differences = total.tolist()
        if not num_changed and not any(differences):
            return True
        if num_changed:
            self._look_at_memory(held)
        else:
            self.compare(held)
        if self._strange == step:
            raise Corrupted(
                Disagrees(rank=self._session.seat.rank, about="state"),
                f"in two passes of step {step} copies of what was held after step {held.step} had different checksums, "
                "and no two hashes differ",
            )
        self._strange = step
        return False

    def is_due(self, step: Step, saving: bool) -> bool:
        """saving: a checkpoint is taken after this step, and only what is agreed on may become one."""
        return self._mirrored and (saving or bool(self._every and step % self._every == 0))

    def compare(self, held: Holdings) -> None:
        """Raises Corrupted in whoever's memory has changed and else in the mirror of what differs; Aborted, PeerLost.

        Of two copies that differ nobody could tell which is right, so each is looked at first.
        """
        self._look_at_memory(held)
        to, of, cut = self._session.mirror_of, self._session.mirrored, held.owned
        hashes = torch.cat([digest(*held.state[:, :cut]), digest(*held.state[:, cut:])])
        theirs = torch.zeros(1, dtype=torch.int64, device=hashes.device)
        sends = [(to, hashes[:1])] if to is not None and cut else []
        receives = [(of, theirs)] if of is not None and held.gradient.numel() > cut else []
        if sends or receives:
            self._session.exchange(sends, receives)
        if receives and not torch.equal(theirs, hashes[1:]):
            assert of is not None
            raise Corrupted(
                Disagrees(rank=of, about="state"),
                f"after step {held.step} this rank's copy of what rank {of} owns has other bits than rank {of}'s own",
            )

    def _look_at_memory(self, held: Holdings) -> None:
        if (found := self.changed_since(held)) is not None:
            raise Corrupted(found, f"since step {held.step} bits of this rank's memory have changed")

    def changed_since(self, held: Holdings) -> Disagrees | None:
        """Whether memory has changed since its last update, which nothing in training does."""
        noted = self._noted
        if noted is None or noted.step != held.step or torch.equal(noted.sums, _checksums(held)):
            return None
        return Disagrees(rank=self._session.seat.rank, about="memory")


def _checksums(held: Holdings) -> torch.Tensor:
    return torch.stack([checksum(held.state[:, : held.owned]), checksum(held.state[:, held.owned :])])


# --- gradients -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One step's recomputation as one rank sees it: id `number` of pipeline `checked` is computed by `checker` too."""

    number: int
    checked: int
    checker: int


def check_of(plan: Plan, step: Step) -> Check | None:
    """The pipeline whose turn it is and another one that is cut alike; None where the plan has no such two."""
    turns = [check for p in range(plan.dp) if (check := _checked_by_next(plan, p)) is not None]
    return turns[step % len(turns)] if turns else None


def _checked_by_next(plan: Plan, checked: int) -> Check | None:
    cut = _cut(plan.pipelines[checked])
    for shift in range(1, plan.dp):
        checker = (checked + shift) % plan.dp
        if _cut(plan.pipelines[checker]) == cut:
            return Check(number=plan.pipelines[checked].micro_batches[0], checked=checked, checker=checker)
    return None


def _cut(pipeline: Pipeline) -> tuple[tuple[int, int, int], ...]:
    return tuple((stage.first, stage.last, len(stage.devices)) for stage in pipeline.stages)


class Recomputation:
    """One step's check in one rank: note the hash of the id's gradient, then compare it with the other pipeline's."""

    def __init__(self, session: Session, buffers: Buffers, check: Check) -> None:
        seat = session.seat
        self._session = session
        self._buffers = buffers
        self._check = check
        self._seat = seat
        self._hash = torch.zeros(1, dtype=torch.int64)

    @property
    def is_checker(self) -> bool:
        return self._seat.pipeline == self._check.checker

    @property
    def is_checked(self) -> bool:
        return self._seat.pipeline == self._check.checked

    @property
    def number(self) -> int:
        return self._check.number

    def note_first(self, number: int) -> None:
        """The checked pipeline's own pass: the id is its first, so that for a moment nothing else has been added."""
        if number == self._check.number:
            self.note()

    def note(self) -> None:
        """The gradient buffer holds exactly that id's gradient now."""
        self._hash = digest(self._buffers.gradient)

    def compare(self, step: Step) -> None:
        """Raises Corrupted in the checker, Aborted, PeerLost. Nothing where the two devices cannot be expected to agree."""
        if not (self.is_checker or self.is_checked):
            return
        mine = torch.cat([self._hash, _kind(self._hash.device)])
        at = self._session.plan.rank_at
        other: Rank = at[self._check.checked if self.is_checker else self._check.checker, self._seat.stage, self._seat.tp]
        if self.is_checked:
            self._session.exchange([(other, mine)], [])
            return
        theirs = torch.zeros_like(mine)
        self._session.exchange([], [(other, theirs)])
        if torch.equal(mine[1], theirs[1]) and not torch.equal(mine[0], theirs[0]):
            raise Corrupted(
                Disagrees(rank=other, about="gradient"),
                f"in step {step} the gradient of micro-batch {self.number} has other bits here than in rank {other}",
            )


def _kind(device: torch.device) -> torch.Tensor:
    """What the bits of a gradient may depend on beside the program: library, device kind, instructions in use."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    words = f"{torch.__version__} {device.type} {name} {torch.get_num_threads()}"
    return torch.tensor([zlib.crc32(words.encode())], dtype=torch.int64, device=device)
