"""Many seeds at once, for the files that share them out: pytest gives each file to one core."""

from __future__ import annotations

from orchestrator.sim.__main__ import replay
from orchestrator.sim.run import Verdict, run

CHUNK = 50
"""Seeds of one test: a few seconds of one core, many times that on a busy machine."""


def chunks(first: int, last: int) -> list[range]:
    return [range(low, low + CHUNK) for low in range(first, last, CHUNK)]


def check(seeds: range) -> None:
    failed = [outcome for seed in seeds if (outcome := run(seed)).verdict is not Verdict.PASSED]
    told = [f"{one.verdict}: {one.message}\nreplay: {replay(one.seed, None)}" for one in failed]
    assert not failed, "\n".join(("\n".join(failed[0].trace[-40:]), *told))
