"""A checkpoint as another library's model: config.json, weights in safetensors files of a bounded size, and their index.

It reads weights through the checkpoint reader, so every byte has had its hash checked, whatever plan wrote it, and holds
one file's worth of them at a time. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from orchestrator.adapters.durable import DISK, write_durably
from orchestrator.adapters.starting_point import Found, differences
from orchestrator.domain.errors import Conflict, Refused
from orchestrator.domain.profile import Interval
from orchestrator.domain.spec import JobSpec

from ..program import load_program
from .foreign import Exportable, Foreign, ForeignTensor
from .reader import read

ExportDtype = Literal["fp32", "bf16"]
DTYPES: dict[str, tuple[torch.dtype, str]] = {"fp32": (torch.float32, "float32"), "bf16": (torch.bfloat16, "bfloat16")}
FILE_BYTES = 1 << 30
"""Of the weights in one file, and so of what is in memory at a time (as fp32 besides)."""
Progress = Callable[[int, int], None]
"""Bytes written so far, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: Path
    num_files: int
    num_tensors: int
    num_bytes: int
    """Of weights."""


def export(
    checkpoint: Found,
    spec: JobSpec,
    out: Path,
    *,
    dtype: ExportDtype = "fp32",
    file_bytes: int = FILE_BYTES,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the model of a checkpoint to `out`, which must not exist yet.

    Raises Refused, Conflict where there is something already, CheckpointCorrupt, OSError; nothing is left of it then.
    """
    foreign, shapes = _model(checkpoint, spec)
    out = out.expanduser().absolute()
    if out.exists():
        raise Conflict(f"{out} is there already; name a folder that is not")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
    draft.mkdir()
    try:
        files = list(_files(foreign.tensors, DTYPES[dtype][0].itemsize, file_bytes))
        done = _write_weights(checkpoint.path, shapes, draft, files, dtype, progress)
        config = {**foreign.config, "torch_dtype": DTYPES[dtype][1]}
        for name, content in {"config.json": json.dumps(config, indent=2).encode(), **foreign.files}.items():
            write_durably(draft / name, content)
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    DISK.sync_directory(out.parent)
    return Exported(path=out, num_files=len(files), num_tensors=len(foreign.tensors), num_bytes=done)


Shapes = Mapping[str, tuple[int, ...]]
"""Of each line."""


def _model(checkpoint: Found, spec: JobSpec) -> tuple[Foreign, Shapes]:
    """Raises Refused where the program has no words for another library, or the checkpoint is of another model."""
    program = load_program(spec.program)
    if not isinstance(program, Exportable):
        raise Refused(
            f"program {spec.program!r} cannot be exported: it does not say what its parameters are called elsewhere; "
            "give it a method foreign(spec), see worker/checkpoint/foreign.py"
        )
    profile = program.describe(spec)
    if problem := "; ".join(differences(checkpoint, profile)):
        raise Refused(f"{checkpoint.path} is not of this program: {problem}; export it with the program that made it")
    return program.foreign(spec), {line.name: line.shape for line in profile.lines}


def _files(tensors: Sequence[ForeignTensor], item_bytes: int, limit: int) -> Iterator[list[ForeignTensor]]:
    """In order, each file as full as fits; a tensor larger than that has one of its own."""
    file: list[ForeignTensor] = []
    size = 0
    for tensor in tensors:
        more = prod(tensor.shape) * item_bytes
        if file and size + more > limit:
            yield file
            file, size = [], 0
        file.append(tensor)
        size += more
    if file:
        yield file


def _write_weights(
    checkpoint: Path,
    shapes: Shapes,
    folder: Path,
    files: Sequence[Sequence[ForeignTensor]],
    dtype: ExportDtype,
    progress: Progress,
) -> int:
    """Bytes of all weights. One file alone needs no index, and is looked for under another name."""
    kind = DTYPES[dtype][0]
    total = sum(prod(tensor.shape) for file in files for tensor in file) * kind.itemsize
    places: dict[str, str] = {}
    done = 0
    progress(done, total)
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        save_file(_weights(checkpoint, shapes, file, kind), folder / name, metadata={"format": "pt"})
        with (folder / name).open("rb") as handle:
            os.fsync(handle.fileno())
        places |= {tensor.name: name for tensor in file}
        done += sum(prod(tensor.shape) for tensor in file) * kind.itemsize
        progress(done, total)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_durably(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
    return total


def _weights(checkpoint: Path, shapes: Shapes, file: Sequence[ForeignTensor], kind: torch.dtype) -> dict[str, torch.Tensor]:
    weights = {}
    wanted = {tensor.line: Interval(tensor.line, 0, prod(shapes[tensor.line])) for tensor in file}
    content = read(checkpoint, list(wanted.values()), kinds=("p",))
    for tensor in file:
        turned = tensor.turn(content[wanted[tensor.line], "p"].view(shapes[tensor.line]))
        if tuple(turned.shape) != tensor.shape:
            raise Refused(
                f"{tensor.name} came out as {tuple(turned.shape)}, not {tensor.shape}; see the program's foreign()"
            )
        weights[tensor.name] = turned.to(kind).contiguous()
    return weights
