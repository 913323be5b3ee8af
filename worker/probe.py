"""Describe a training program in a process of its own, before anything is held for it: JobSpec in, one JSON object out.

    {"profile": {...}, "start": {...} or null}                  it can work, and begins with that checkpoint
    {"refused": {"message": "...", "problems": [{...}]}}        it cannot, and why

With `--program` the program alone is described: neither text nor checkpoints are looked at, and `start` is null. With
`--cell` it becomes the user that job code runs as before the program is imported, see confinement.py.

It owns the boundary to the user's code: whatever that prints goes to stderr, whatever it raises becomes a refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Any

from orchestrator.adapters.places import place
from orchestrator.adapters.starting_point import start_of
from orchestrator.domain import codec
from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.profile import BLOCK, Profile, exact_groups, splits_a_block
from orchestrator.domain.spec import JobSpec

from .confinement import Cell, enter
from .data import sources
from .data.sampling import split
from .page.layout import MAX_GROUPS, MAX_IDS
from .program import load_program, source_sha256

MOST_TP = 64
"""Named to a user: no node has more devices."""


def main() -> None:
    # A core on the disk would have what is in the environment, the job's secrets among it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", action="store_true")
    parser.add_argument("--cell", default="{}")
    asked = parser.parse_args()
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # from here on "stdout" is stderr, also for what the program's libraries write past Python
    try:
        spec = codec.loads(JobSpec, sys.stdin.read())
        cell = codec.loads(Cell, asked.cell.encode())
        if asked.program:
            enter(cell)
            answer: dict[str, Any] = {"profile": codec.encode(describe_program(spec)), "start": None}
        else:
            profile = describe(spec, cell)
            answer = {"profile": codec.encode(profile), "start": codec.encode(start_of(spec, profile))}
    except Refused as refused:
        answer = {"refused": {"message": refused.message, "problems": codec.encode(refused.problems)}}
    except BaseException as error:
        traceback.print_exc()
        said = traceback.format_exception_only(error)[-1].strip()
        answer = {"refused": {"message": f"the program failed while it was described: {said}", "problems": []}}
    result.write(json.dumps(answer) + "\n")
    result.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever threads the program has started


def describe(spec: JobSpec, cell: Cell | None = None) -> Profile:
    """The program's profile, once program, settings, text, degrees and places are known to fit. Raises Refused.

    cell: what this process makes itself before the program is imported.
    """
    place(spec.checkpoint.path)  # what cannot be opened is said now, not after the first interval of steps
    tokens = sources.load(spec.data, for_everybody=cell is not None and cell.is_apart)
    if cell is not None:
        enter(cell)
    profile = load_program(spec.program).describe(spec)
    training, _ = split(tokens, spec.train, spec.evaluation)
    sources.num_samples(training, spec.train.sequence)
    return replace(_checked(spec, profile), text_sha256=sources.digest(tokens), program_sha256=source_sha256(spec.program))


def describe_program(spec: JobSpec) -> Profile:
    """The program's profile without any text. Raises Refused."""
    return _checked(spec, load_program(spec.program).describe(spec))


def _checked(spec: JobSpec, profile: Profile) -> Profile:
    problems = tuple(_degree_problems(spec, profile))
    if problems:
        raise Refused("; ".join(problem.message for problem in problems), problems)
    return profile


def _degree_problems(spec: JobSpec, profile: Profile) -> Iterator[FieldProblem]:
    """What no cluster could cure."""
    ids, tp, pp, dp = spec.train.micro_batches, spec.parallel.tp, spec.parallel.pp, spec.parallel.dp
    if ids > MAX_IDS:
        said = f"is {ids}, at most {MAX_IDS} are carried; raise train.micro_batch_size instead"
        yield _problem("train.micro_batches", ids, said, f"<= {MAX_IDS}")
    if tp is not None and (uncut := [one for one in profile.divisors if tp < 1 or one.value % tp]):
        every = gcd(*(one.value for one in profile.divisors))
        allowed = ", ".join(str(degree) for degree in range(1, min(every, MOST_TP) + 1) if every % degree == 0)
        fields = " and ".join(f"{one.field} {one.value}" for one in uncut[:2])
        others = f" and {len(uncut) - 2} more" if len(uncut) > 2 else ""
        yield _problem("parallel.tp", tp, f"is {tp} and does not divide {fields}{others}; use one of {allowed}", allowed)
    if spec.train.exact and (groups := len(exact_groups(profile))) > MAX_GROUPS:
        said = f"is {spec.train.exact}, and the program has {groups} parameter groups, {MAX_GROUPS} fit; set it to false"
        yield _problem("train.exact", spec.train.exact, said, "false")
    if spec.train.exact and tp and (line := splits_a_block(profile, tp)):
        said = (
            f"is {spec.train.exact}, but parallel.tp {tp} cuts {line.name} inside a block: {line.numel} elements are no "
            f"multiple of tp x {BLOCK}; lower tp, change the model's sizes or set train.exact to false"
        )
        yield _problem("train.exact", spec.train.exact, said, "false")
    if pp is not None and pp > profile.num_layers:
        allowed = f"<= {profile.num_layers}"
        yield _problem("parallel.pp", pp, f"is {pp}, but the program has {profile.num_layers} layers; lower it", allowed)
    if (pp or 1) * (dp or 1) > ids:
        field, value = ("parallel.pp", pp) if pp else ("parallel.dp", dp)
        yield _problem(
            field,
            value,
            f"is {value}: pp {pp or 1} x dp {dp or 1} needs {(pp or 1) * (dp or 1)} micro-batches (each pipeline takes at "
            f"least as many as it has stages) and train.micro_batches is {ids}; raise that or lower the degree",
            f"pp x dp <= {ids}",
        )


def _problem(field: str, value: object, said: str, allowed: str) -> FieldProblem:
    return FieldProblem(field=field, value=value, message=f"{field} {said}", allowed=allowed)


if __name__ == "__main__":
    main()
