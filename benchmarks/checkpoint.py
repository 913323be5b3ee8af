"""What checkpoints cost and how fast they come back, beside torch.distributed.checkpoint (DCP), on one disk in one process.

    python -m benchmarks.checkpoint --json [--layers 15 --width 768] [--folder DIR] [--only restore]

A model of 107 M parameters by default trains a few real steps; its state is saved as eight devices of tp2 x pp2 x dp2 would
save it, at every step, and by DCP. The last line of output is one JSON object.

    bytes_ratio_dense      bytes of a save at every step, a base every BASE_EVERY of them, over those of DCP's save
    bytes_ratio_frozen     the same with 95 % of the elements frozen, every save a base
    restore_ratio_to_dcp   seconds to restore everything, over DCP's load of it into tensors that are there already
    reshard_ratio_to_dcp   seconds to restore the three ranks of tp1 x pp1 x dp3 one after another, over the same
    stall_ratio_to_async_save, stall_share_of_step, memory_ratio   what training sees of a save: checkpoint_stall.py
    flips_found, _tried    single bytes changed at random in a small checkpoint, and those that verifying it found
    kill_points, _ok       calls by which a save, its commit and a removal change the disk; and those of them at which
                           a process could be killed with a checkpoint there afterwards, right in every bit
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from orchestrator.adapters import manifest, spec_file
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, TrainSpec
from worker.checkpoint.reader import restore
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.snapshot import Snapshot
from worker.loop import Trainer
from worker.program import load_program
from worker.reference import run
from worker.state.holdings import KINDS, Holdings
from worker.state.pieces import Piece
from worker.state.relayout import from_checkpoint

from .checkpoint_stall import stalls
from .mishaps import flips, kills

CPU = torch.device("cpu")
BASE_STEP, ENTRIES = 2, 2
BASE_EVERY = 32
FROZEN = 0.95
ROUNDS = 3
G = Generation(1)
BEGUN = time.perf_counter()


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP is alone, as we are
    with TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        spec = _spec(options)
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "bytes": Measured(Path(folder) / "b", spec).bytes,
            "restore": Measured(Path(folder) / "r", spec).restore,
            "faults": lambda: {**flips(Path(folder) / "f"), **kills(Path(folder) / "k")},
            "stalls": lambda: stalls(Path(folder) / "s", spec, load_program(spec.program).describe(spec)),
        }
        found: dict[str, float] = {}
        for name in [options.only] if options.only else parts:
            _note(name)
            found |= parts[name]()
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))


class Measured:
    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._profile = load_program(spec.program).describe(spec)
        self._steps = _Job(folder / "steps", spec, self._profile)
        self._frozen = _Job(folder / "frozen", spec, self._profile)
        self._found: dict[str, float] = {}
        self._thawed = _thawed(self._profile)
        self._kept: torch.Tensor | None = None

    def bytes(self) -> dict[str, float]:
        """Of saves at every step, dense and with most of it frozen; and what comes back from a journal."""
        run(self._spec, BASE_STEP + ENTRIES, self._look)
        base, entries = self._bytes(self._steps)
        full = self._found["dcp_bytes"]
        first, others = self._bytes(self._frozen)
        return {
            "parameters": self._profile.num_params,
            "bytes_ratio_dense": (base + (BASE_EVERY - 1) * entries) / BASE_EVERY / full,
            "bytes_ratio_frozen": others / full,
            "base_bytes": base,
            "entry_bytes": entries,
            "frozen_first_bytes": first,
            **self._found,
        }

    def restore(self) -> dict[str, float]:
        """How fast all of one state comes back."""
        run(self._spec, BASE_STEP, self._beside_dcp)
        return {"parameters": self._profile.num_params, **self._found}

    def _look(self, trainer: Trainer, answer: Answer) -> None:
        held, step = trainer.holdings, answer.step
        if held is None or step < BASE_STEP:
            return
        _note(f"step {step} is made")
        snapshots = self._steps.snapshots(held, answer, is_entry=step > BASE_STEP)
        self._found["base_s" if step == BASE_STEP else "entry_s"] = self._steps.save(snapshots)
        # The same training with all but the last lines frozen, as far as a disk can tell.
        mine = held.state.clone()
        if self._kept is not None:
            for piece in held.owned_pieces:
                if piece.interval.line not in self._thawed:
                    columns = slice(piece.offset, piece.offset + len(piece.interval))
                    mine[:, columns] = self._kept[:, columns]
        self._kept = mine
        before, held.state = held.state, mine
        self._frozen.save(self._frozen.snapshots(held, answer))
        held.state = before
        _note(f"step {step} is saved")
        if step == BASE_STEP + ENTRIES:
            self._saved_by_dcp(held)
            again = torch.zeros_like(held.state)
            begun = time.perf_counter()
            restore(self._steps.path(answer.step), held.owned_pieces, again, held.gradient.clone())
            self._found["journal_restore_s"] = time.perf_counter() - begun
            assert torch.equal(again, held.state), "a journal gives back every bit"

    def _saved_by_dcp(self, held: Holdings) -> tuple[Path, dict[str, torch.Tensor]]:
        """Where, and what."""
        theirs = self._folder / "dcp"
        state = {
            f"{kind}.{name}": values
            for name, rows in _whole(held).items()
            for kind, values in zip(KINDS, rows, strict=True)
        }
        begun = time.perf_counter()
        dcp_save(state, checkpoint_id=theirs, no_dist=True)
        self._found["dcp_save_s"] = time.perf_counter() - begun
        self._found["dcp_bytes"] = sum(file.stat().st_size for file in theirs.rglob("*") if file.is_file())
        return theirs, state

    def _beside_dcp(self, trainer: Trainer, answer: Answer) -> None:
        held = trainer.holdings
        if held is None or answer.step < BASE_STEP:
            return
        mine = _Job(self._folder / "mine", self._spec, self._profile)
        self._found["save_s"] = mine.save(mine.snapshots(held, answer))
        theirs, state = self._saved_by_dcp(held)
        room = {name: torch.zeros_like(values) for name, values in state.items()}
        again = torch.zeros_like(held.state)
        ranks = _ranks(self._profile, answer.step)
        ways: dict[str, Callable[[], object]] = {
            "dcp_load_s": lambda: dcp_load(room, checkpoint_id=theirs, no_dist=True),
            "restore_s": lambda: restore(mine.path(answer.step), held.owned_pieces, again, held.gradient),
            "reshard_s": lambda: _resharded(ranks, mine.path(answer.step)),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        worked: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                begun, cpu = time.perf_counter(), time.process_time()
                way()
                took[name].append(time.perf_counter() - begun)
                worked[name].append(time.process_time() - cpu)
        assert torch.equal(again, held.state) and all(torch.equal(room[name], state[name]) for name in state)
        self._found |= {name: median(seconds) for name, seconds in took.items()}
        self._found |= {name.replace("_s", "_cpu_s"): median(seconds) for name, seconds in worked.items()}
        self._found["restore_ratio_to_dcp"] = self._found["restore_s"] / self._found["dcp_load_s"]
        self._found["reshard_ratio_to_dcp"] = self._found["reshard_s"] / self._found["dcp_load_s"]

    def _bytes(self, job: _Job) -> tuple[float, float]:
        """Of the first save, and of the others on average, indexes and all."""
        first, *others = [job.written(Step(step)) for step in range(BASE_STEP, BASE_STEP + ENTRIES + 1)]
        return float(first), sum(others) / len(others)


class _Job:
    """One job's folder and the writers of its eight devices."""

    def __init__(self, folder: Path, spec: JobSpec, profile: Profile) -> None:
        self._folder = folder
        self._spec = spec
        self._profile = profile
        self._plan = _plan(profile, tp=2, pp=2, dp=2)
        self._writers = {device: ShardWriter(folder, profile, device) for device in self._plan.devices}
        spec_file.keep(folder, spec_file.Kept(job=JobId("job"), spec=spec, profile=profile))

    def snapshots(self, held: Holdings, answer: Answer, *, is_entry: bool = False) -> list[Snapshot]:
        """Of each device: what it would own of this state, or of the gradient that led to it."""
        made = []
        for seat in self._plan.seats:
            share = Holdings(buckets(self._plan, self._profile), seat.rank, None, G, CPU)
            share.step = answer.step
            for piece in share.owned_pieces:
                columns = slice(piece.offset, piece.offset + len(piece.interval))
                share.gradient[columns] = torch.cat(held.gradients(piece.interval))
                share.state[:, columns] = torch.cat(held.views(piece.interval), dim=1)
            made.append(Snapshot.of_gradient(share, G, answer) if is_entry else Snapshot.of(share, G, answer))
        return made

    def save(self, snapshots: list[Snapshot]) -> float:
        """Seconds until it is committed, one device after another."""
        begun = time.perf_counter()
        step = snapshots[0].step
        shards = [self._writers[seat.device].write(one) for seat, one in zip(self._plan.seats, snapshots, strict=True)]
        spec_hash = spec_file.hash_of(self._spec)
        manifest.commit(self.path(step), step, G, spec_hash, self._spec.train.seed, shards)
        return time.perf_counter() - begun

    def path(self, step: Step) -> Path:
        return self._folder / manifest.directory_name(step, G)

    def written(self, step: Step) -> int:
        packs = self._folder.glob(f"packs/*/{step:08d}.g{G}*.pack")
        return sum(file.stat().st_size for file in (*packs, *self.path(step).iterdir()))


def _resharded(ranks: list[Holdings], path: Path) -> None:
    for held in ranks:
        from_checkpoint(held, path)


def _ranks(profile: Profile, step: Step) -> list[Holdings]:
    """What the ranks of tp1 x pp1 x dp3 would hold, its memory touched as what DCP loads into is."""
    plan, made = _plan(profile, tp=1, pp=1, dp=3), []
    for seat in plan.seats:
        held = Holdings(buckets(plan, profile), seat.rank, None, Generation(2), CPU)
        held.step = step
        held.state.fill_(0.0)
        made.append(held)
    return made


def _whole(held: Holdings) -> dict[str, torch.Tensor]:
    """Line -> (3, numel): dense copies."""
    lines: dict[str, list[Piece]] = {}
    for piece in held.owned_pieces:
        lines.setdefault(piece.interval.line, []).append(piece)
    return {
        name: torch.cat([held.state[:, p.offset : p.offset + len(p.interval)] for p in pieces], dim=1).contiguous()
        for name, pieces in lines.items()
    }


def _thawed(profile: Profile) -> frozenset[str]:
    """The last lines, as many as are 5 % of the elements."""
    room = (1 - FROZEN) * profile.num_params
    names = []
    for line in reversed(profile.lines):
        if line.numel <= room:
            names.append(line.name)
            room -= line.numel
    return frozenset(names)


def _plan(profile: Profile, *, tp: int, pp: int, dp: int) -> Plan:
    devices = _devices()
    cuts = [stage * profile.num_layers // pp for stage in range(pp + 1)]
    return Plan(
        pipelines=tuple(
            Pipeline(
                stages=tuple(
                    Stage(first=a, last=b, devices=tuple(next(devices) for _ in range(tp))) for a, b in pairwise(cuts)
                ),
                micro_batches=(number,),
            )
            for number in range(dp)
        )
    )


def _devices() -> Iterator[Device]:
    number = 0
    while True:
        yield Device(NodeId(f"n{number // 4}"), number % 4)
        number += 1


def _note(what: str) -> None:
    print(f"{time.perf_counter() - BEGUN:6.1f} s  {what}", file=sys.stderr, flush=True)


def _spec(options: argparse.Namespace) -> JobSpec:
    width = options.width
    return JobSpec(
        name="checkpoint",
        program="causal_lm",
        data=DataSpec(files=("{stdlib}/*.py",), max_bytes=2_000_000),
        train=TrainSpec(steps=1000, micro_batches=2, micro_batch_size=1, sequence=64, learning_rate=1e-3, warmup_steps=2),
        model={"layers": options.layers, "width": width, "heads": 12, "kv_heads": 12, "ffn": width * 8 // 3},
        checkpoint=CheckpointSpec(every=0),
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What checkpoints cost, beside torch.distributed.checkpoint.")
    parser.add_argument("--json", action="store_true", help="does nothing: the last line is JSON anyway")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--only", choices=("bytes", "restore", "faults", "stalls"), help="this part alone")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; a temporary folder by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
