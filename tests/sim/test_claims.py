"""What a job claims is worked out again only when something changed that it is worked out from."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.domain.job import JobRecord
from orchestrator.jobs.arbitration import Claim
from orchestrator.sim.run import Verdict, run
from orchestrator.supervisor import arbitrating


@pytest.mark.parametrize("seed", range(3000, 3012))
def test_a_claim_that_is_kept_is_the_one_that_would_be_made(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = arbitrating.claim_of, 0
    the_same = arbitrating._claims_the_same

    def checked(old: JobRecord, new: JobRecord) -> bool:
        nonlocal kept
        is_kept = the_same(old, new)
        if is_kept and old is not new:
            kept += 1
            assert made(old) == made(new)
        return is_kept

    monkeypatch.setattr(arbitrating, "_claims_the_same", checked)
    assert run(seed).verdict is Verdict.PASSED
    assert kept


def test_no_other_field_of_a_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()

    class Seen(JobRecord):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    made = arbitrating.claim_of

    def watched(record: JobRecord) -> Claim | None:
        seen = object.__new__(Seen)
        seen.__dict__.update(record.__dict__)
        read.discard("__dict__")
        return made(seen)

    monkeypatch.setattr(arbitrating, "claim_of", watched)
    for seed in (3, 33, 99, 421):  # a crowd among them: jobs that wait, start, yield, break and end
        run(seed)
    fields = read & set(JobRecord.__dataclass_fields__)
    assert {"turn", "plans", "considered"} <= fields
    assert fields <= set(arbitrating.CLAIMED_FROM)
