"""What a program is: the seam between a model and everything that keeps it alive.

A program describes its parameters as lines, makes any of them from a seed, and builds any contiguous range of its layers
out of tensors it is given. It never allocates, initialises, moves or updates a parameter itself, and it knows nothing of
generations, plans or optimizers.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from orchestrator.domain.errors import Refused
from orchestrator.domain.profile import Line, Profile
from orchestrator.domain.spec import JobSpec

from .confinement import closed_to
from .parallel.group import Group

Leaves = Mapping[tuple[str, int], nn.Parameter]
"""(line name, layer that uses it) -> this tp rank's part, shape (shape[0] / tp, ...) for split lines, whole otherwise.

A tied line has one leaf per use; their gradients are summed by the caller.
"""


class StageModule(nn.Module):
    """Layers first..last-1 on one tp rank.

    forward(x, ids, step): x is tokens (B, T) int64 on the first stage, else hidden states (B, T / tp, D);
    returns hidden states (B, T / tp, D), or on the last stage this rank's part of the logits (B, T, V / tp).
    `ids` is an int64 tensor of shape (1,) holding the micro-batch id, `step` an int64 tensor of shape (1,): everything
    random (dropout) is a pure function of (seed, step, id, layer).
    """

    hidden_shape: tuple[int, ...]
    """Of what passes between stages, for one micro-batch."""
    hidden_dtype: torch.dtype
    logits_shape: tuple[int, ...]

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed cross-entropy over the micro-batch's tokens (fp32 scalar, the same on every tp rank). targets: (B, T)."""
        raise NotImplementedError


@runtime_checkable
class Program(Protocol):
    def describe(self, spec: JobSpec) -> Profile:
        """Raises Refused with one clear sentence when the settings cannot work."""
        ...

    def initial(self, spec: JobSpec, line: Line) -> torch.Tensor:
        """The line's whole initial value, flat fp32: a pure function of (seed, line name)."""
        ...

    def build(self, spec: JobSpec, first: int, last: int, tp: Group, leaves: Leaves) -> StageModule: ...


@dataclass(frozen=True, slots=True)
class Builtin:
    module: str
    attribute: str


BUILTINS: dict[str, Builtin] = {"causal_lm": Builtin("worker.programs.causal_lm", "PROGRAM")}


def source_sha256(name: str) -> str:
    """Of the source of a program that can be loaded: its module's file, of a built-in one with those beside it; "" where
    there is none."""
    module = BUILTINS[name].module if name in BUILTINS else name.partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return ""
    files = sorted(Path(file).parent.glob("*.py")) if name in BUILTINS else [Path(file)]
    return hashlib.sha256(b"\0".join(one.name.encode() + b"\0" + one.read_bytes() for one in files)).hexdigest()


def load_program(name: str) -> Program:
    """A built-in by name, or `module:attribute` (a Program, or a callable that returns one). Raises Refused."""
    if name in BUILTINS:
        found = BUILTINS[name]
    elif ":" in name:
        found = Builtin(*name.split(":", 1))
    else:
        raise Refused(f"program {name!r} is unknown; use one of {', '.join(BUILTINS)} or module:attribute")
    try:
        program = getattr(importlib.import_module(found.module), found.attribute)
    except (ImportError, AttributeError) as error:
        closed = closed_to(os.geteuid(), sys.path) if os.geteuid() else []
        why = f"{error}; {', '.join(closed)} is closed to the user jobs run as, chmod a+rx it" if closed else str(error)
        raise Refused(f"program {name!r} cannot be imported: {why}") from error
    if isinstance(program, type) or not isinstance(program, Program):
        program = program() if callable(program) else program
    if not isinstance(program, Program):
        raise Refused(f"program {name!r} has no describe, initial and build; see worker/program.py")
    return program
