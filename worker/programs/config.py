"""Settings of the causal language model, read from a job's spec; it refuses what cannot work and knows no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import get_args

from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.spec import Dtype, JobSpec

NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of a decoder. `ffn` is the hidden size of the gated feed-forward; `kv_heads` = `heads` unless said."""

    layers: int
    width: int
    heads: int
    ffn: int
    kv_heads: int = 0
    vocabulary: int = NUM_BYTES
    tied: bool = False
    dropout: float = 0.0
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def read_settings(spec: JobSpec) -> Settings:
    """Raises Refused, naming every field that cannot work and why."""
    problems = [*_unreadable(spec)]
    if not problems:
        given = {"kv_heads": spec.model["heads"], **spec.model}
        settings = Settings(**given)  # type: ignore[arg-type]
        problems = [*_impossible(settings, spec)]
        if not problems:
            return settings
    raise Refused("; ".join(problem.message for problem in problems), tuple(problems))


def _unreadable(spec: JobSpec) -> Iterator[FieldProblem]:
    known = {field.name: field for field in fields(Settings)}
    for name, value in spec.model.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}"
            yield _problem(f"model.{name}", value, f"is not a setting of causal_lm; {hint}", ", ".join(known))
        elif not _fits(value, str(known[name].type)):
            kind = {"int": "a whole number", "float": "a number", "bool": "true or false"}[str(known[name].type)]
            yield _problem(f"model.{name}", value, f"is {value!r}; it must be {kind}", kind)
    for name, field in known.items():
        if field.default is MISSING and name not in spec.model:
            yield _problem(f"model.{name}", None, "is missing; causal_lm cannot choose it, so give it a value")


def _fits(value: object, kind: str) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    return isinstance(value, int) or (kind == "float" and isinstance(value, float))


def _impossible(settings: Settings, spec: JobSpec) -> Iterator[FieldProblem]:
    for name in ("layers", "width", "heads", "kv_heads", "ffn"):
        value = getattr(settings, name)
        if value < 1:
            yield _problem(f"model.{name}", value, f"is {value} and must be at least 1; raise it", ">= 1")
    for name in ("steps", "micro_batches", "micro_batch_size", "sequence"):
        value = getattr(spec.train, name)
        if value < 1:
            yield _problem(f"train.{name}", value, f"is {value} and must be at least 1; raise it", ">= 1")
    if spec.train.dtype not in get_args(Dtype):
        allowed = " or ".join(get_args(Dtype))
        yield _problem("train.dtype", spec.train.dtype, f"is {spec.train.dtype!r}; use {allowed}", allowed)
    if settings.vocabulary < NUM_BYTES:
        message = f"is {settings.vocabulary}, but the text is bytes, which take {NUM_BYTES} values; use at least that"
        yield _problem("model.vocabulary", settings.vocabulary, message, f">= {NUM_BYTES}")
    if not 0 <= settings.dropout < 1:
        message = f"is {settings.dropout}, outside 0 <= dropout < 1; 0 turns it off"
        yield _problem("model.dropout", settings.dropout, message, "0 <= dropout < 1")
    if not 1 < settings.rope_theta < float("inf"):
        message = f"is {settings.rope_theta} and must be above 1; 10000 is usual"
        yield _problem("model.rope_theta", settings.rope_theta, message, "> 1")
    if settings.heads < 1 or settings.kv_heads < 1:
        return
    if settings.width % settings.heads:
        message = f"is {settings.heads} and does not divide model.width {settings.width}; use a divisor of the width"
        yield _problem("model.heads", settings.heads, message, f"a divisor of {settings.width}")
    elif settings.head_dim % 2:
        message = (
            f"is {settings.heads}, which leaves {settings.head_dim} numbers a head of model.width {settings.width}; "
            "rotary positions turn pairs, so choose heads for which width / heads is even"
        )
        yield _problem("model.heads", settings.heads, message, "width / heads even")
    if settings.heads % settings.kv_heads:
        message = f"is {settings.kv_heads} and does not divide model.heads {settings.heads}; use a divisor of heads"
        yield _problem("model.kv_heads", settings.kv_heads, message, f"a divisor of {settings.heads}")


def _problem(field: str, value: object, said: str, allowed: str | None = None) -> FieldProblem:
    return FieldProblem(field=field, value=value, message=f"{field} {said}", allowed=allowed)
