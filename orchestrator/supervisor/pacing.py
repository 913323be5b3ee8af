"""How often a job saves and what: as its file says, or, where that says auto, what is expected to cost it least.

    saves ──> measured costs ──> recovery/pace.py ──> another pace, said with its reason ──> the generation that trains

It owns the pace. It refuses to know how saves are committed (keeping.py) and carried out: ranks are told, and agree.
"""

from __future__ import annotations

from orchestrator.domain.checkpoint import Pacing
from orchestrator.domain.ids import Generation
from orchestrator.domain.job import JobRecord

from .draft import Draft


def pacing_of(record: JobRecord) -> Pacing:
    return record.pacing or Pacing.asked_for(record.spec.checkpoint)


def paced(draft: Draft, generation: Generation) -> Pacing:
    """What a generation that is being formed is told."""
    draft.set(pacing_told=generation)
    return pacing_of(draft.record)
