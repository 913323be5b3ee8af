"""What hosts keep of their job, as they keep it across versions of the supervisor."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.ids import Term
from orchestrator.domain.memo import Memo, Reign
from tests import samples

REIGNS = (
    Reign(term=Term(1), by="rack-1:/var/lib/everstep 5d1c", commits=0, at=1_700_000_000.5),
    Reign(term=Term(4), by="rack-2:/var/lib/everstep 09fe", commits=71, at=1_700_000_900.25),
)
MEMOS = tuple(Memo(reigns=REIGNS, commits=72 + number, record=record) for number, record in enumerate(samples.RECORDS[:1]))
MEMOS = (*MEMOS, replace(MEMOS[0], reigns=REIGNS[:1], commits=70))
