"""A generation whose state comes from memory and from disk: each interval from the nearest, all of one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import PROGRAM, SPEC, TP2_PP2_DP2, a_plan, assert_mirrors_equal_owners, ranks

from orchestrator.adapters import manifest
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.layout import layout
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed, Read
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import CheckpointSpec
from orchestrator.recovery.restore import choose_restore
from orchestrator.recovery.settle import settle

pytestmark = pytest.mark.timeout(300)
G1 = Generation(1)


def test_what_no_living_rank_holds_comes_from_a_checkpoint_of_the_same_step_to_the_bit(tmp_path: Path) -> None:
    spec = replace(SPEC, checkpoint=CheckpointSpec(every=4))
    profile, alive = PROGRAM.describe(spec), frozenset(TP2_PP2_DP2.devices[:2])
    target = a_plan(([0, 3, 6], [0, 1, 2, 3]))
    with ranks(spec, TP2_PP2_DP2, tmp_path) as group:
        said = group.run(TP2_PP2_DP2, 1, FromSeed(), 4)
        shards = [event.shard for one in said.values() for event in one.shards]
        ref = manifest.commit(tmp_path / manifest.directory_name(Step(4), G1), Step(4), G1, "hash", 0, shards)
        plan = choose_restore(
            settlement=settle(G1, Step(4), ref.answer, {d: said[d].report for d in TP2_PP2_DP2.devices}),
            plans={G1: TP2_PP2_DP2},
            usable=alive,
            target=target,
            profile=profile,
            mirrors=1,
            checkpoint=ref,
        )
        assert isinstance(plan.restore, FromMemory) and plan.restore.reads and plan.step == 4
        mixed = group.run(target, 2, plan.restore, 6)
        assert_mirrors_equal_owners(target, mixed)
        read = group.run(target, 3, FromCheckpoint(checkpoint=ref), 6)
        for device in target.devices:
            assert mixed[device].answers == read[device].answers
            assert torch.equal(mixed[device].held["owned"][1], read[device].held["owned"][1])
        # Where it is damaged nobody goes on with half of it, and everybody knows which it was.
        for pack in (tmp_path / "packs").glob("*/*"):
            pack.write_bytes(bytes(pack.stat().st_size))
        broken = group.run(target, 4, replace(plan.restore, moves=(), reads=_everything(target, profile)), 5)
        assert all("hash they were written with" in one.error for one in broken.values())


def _everything(plan: Plan, profile: Profile) -> tuple[Read, ...]:
    held = layout(plan, profile, mirrors=1)
    return tuple(Read(interval, device) for device in plan.devices for interval in held.held(device))
