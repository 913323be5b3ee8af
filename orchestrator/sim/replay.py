"""A bundle of a real job (docs/bundle.md) as a scenario: its cluster, its spec, and its incidents in their order.

Each incident becomes the trouble that looks like its cause, on the same device, once the job has come as far as it had.
Quiet stretches are shortened, and the profile is the simulator's own: what is tried again is what the kernel decides, not
how long anything took. It refuses to know how trouble is made.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from orchestrator.domain.errors import Refused
from orchestrator.domain.ids import Step
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec

from .scenario import Scenario, Scripted, Trouble, profile

FORMAT, VERSION = "everstep-bundle", 1
QUIET_STEPS = 20
"""Kept of a stretch in which nothing happened, and after the last incident."""
LOOKS_LIKE = {
    "rank_lost": Trouble.KILL_RANK,
    "node_lost": Trouble.KILL_NODE,
    "link_lost": Trouble.CUT_LINK,
    "hang": Trouble.HANG_RANK,
    "corruption": Trouble.FLIP_BIT,
    "not_finite": Trouble.NOT_FINITE,
    "checkpoint": Trouble.FORGE_CHECKPOINT,
    "contact_lost": Trouble.CUT_ALL,
}
"""Resizes and pauses are not among them: their owner asked for those, and a bundle does not say for what."""


def scenario_of(path: Path, seed: int = 0) -> Scenario:
    """Chance in it, as in how long messages take, is the seed's. Raises Refused."""
    files = _files(path)
    manifest = json.loads(files.get("manifest.json", "{}"))
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        said = f"{manifest.get('format')} {manifest.get('version')}"
        raise Refused(f"{path} is {said}, this reads {FORMAT} {VERSION}; make it again with `everstep bundle`")
    incidents = [one for one in _lines(files, "incidents.jsonl") if one.get("cause") in LOOKS_LIKE]
    nodes = {str(one["id"]): one for one in _lines(files, "nodes.jsonl")}
    sizes = {node: int(one["num_devices"]) for node, one in nodes.items()}
    for device in (device for one in incidents for device in one["devices"]):
        node, _, index = str(device).rpartition("/")
        sizes[node] = max(sizes.get(node, 0), int(index) + 1)  # one that was gone when the bundle was made
    if not sizes:
        raise Refused(f"{path} has no nodes in it, so there is no cluster to replay; make it while the cluster is there")
    place = {node: number for number, node in enumerate(sorted(sizes))}
    script, steps, before = [], 0, 0
    for one in incidents:
        committed = int(one["committed"])
        steps += min(QUIET_STEPS, max(1, committed - before))
        before = committed
        script.append(
            Scripted(
                step=Step(steps),
                trouble=LOOKS_LIKE[str(one["cause"])],
                devices=tuple(
                    f"n{place[node]}/{index}" for node, _, index in (str(d).rpartition("/") for d in one["devices"])
                ),
            )
        )
    kinds = tuple(str(nodes[node]["kind"]) if node in nodes else "cpu" for node in sorted(sizes))
    return Scenario(
        seed=seed,
        nodes=tuple(sizes[node] for node in sorted(sizes)),
        kinds=kinds,
        jobs=(_spec(json.loads(files.get("config.json", "{}")), steps + QUIET_STEPS),),
        troubles=(),
        between_s=1.0,
        trouble_until_s=60.0 * (len(script) + 1),
        gentle=False,
        script=tuple(script),
    )


def _spec(config: Mapping[str, Any], steps: int) -> JobSpec:
    """What of a job file says how it is planned, kept and recovered; the mathematics is the simulator's."""
    known = {name: _some(kind, config.get(name) or {}) for name, kind in SECTIONS.items()}
    train = replace(
        TrainSpec(steps=steps, micro_batches=8, micro_batch_size=1, sequence=8),
        **{key: value for key, value in known["train"].items() if key in ("micro_batches", "exact", "emulated_layer_s")},
    )
    parallel = ParallelSpec(**known["parallel"])
    heads = min(one.value for one in profile().divisors)
    if (parallel.tp and heads % parallel.tp) or (parallel.pp or 1) > profile().num_layers:
        parallel = replace(parallel, tp=None, pp=None)  # the simulated model is too small for them
    return JobSpec(
        name="job0",
        program="causal_lm",
        data=DataSpec(files=("*.txt",)),
        train=train,
        parallel=parallel,
        checkpoint=replace(CheckpointSpec(**known["checkpoint"]), path="", local="", restore_from=""),
        recovery=RecoverySpec(**known["recovery"]),
    )


SECTIONS: Mapping[str, type] = {
    "train": TrainSpec,
    "parallel": ParallelSpec,
    "checkpoint": CheckpointSpec,
    "recovery": RecoverySpec,
}


def _some(kind: type, section: Mapping[str, Any]) -> dict[str, Any]:
    """Those of its fields that this version knows: a reader ignores what it does not."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in section.items() if name in names}


def _files(path: Path) -> dict[str, str]:
    """By name, without the folder that is named after the job. Logs are left alone."""
    try:
        if path.is_dir():
            return {one.name: one.read_text() for one in sorted(path.iterdir()) if one.suffix in (".json", ".jsonl")}
        with tarfile.open(path) as archive:
            inside = (member for member in archive if member.isfile() and member.name.endswith((".json", ".jsonl")))
            return {Path(one.name).name: _read(archive, one) for one in inside}
    except (OSError, tarfile.TarError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read as a bundle ({error}); `everstep bundle JOB` makes one") from error


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    found = archive.extractfile(member)
    return found.read().decode() if found is not None else ""


def _lines(files: Mapping[str, str], name: str) -> Iterable[dict[str, Any]]:
    return [json.loads(line) for line in files.get(name, "").splitlines() if line]
