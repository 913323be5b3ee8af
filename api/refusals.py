"""Pydantic's validation errors in our words: field, value, what is allowed, and the key that was probably meant.

Knows models and their annotations; knows nothing of HTTP.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from orchestrator.domain.errors import FieldProblem, Refused

from .redaction import redacted

_UNKNOWN = "unknown key"
_WORDS = {
    "missing": "is required",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
}


def refusal(error: ValidationError, model: type[BaseModel]) -> Refused:
    problems = problems_of(error.errors(include_url=False), model)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Refused(sentence(problems[0]) + more, problems)


def problems_of(errors: Sequence[Any], model: type[BaseModel] | None = None) -> tuple[FieldProblem, ...]:
    """One problem per pydantic error, unknown keys first: a misspelt key usually explains a missing one."""
    ordered = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    return tuple(_problem(error, model) for error in ordered if not _follows(error, errors))


def _follows(error: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> bool:
    """A list that is too short only because what is wrong in it does not count."""
    loc = tuple(error["loc"])
    return error["type"] == "too_short" and any(
        len(other["loc"]) > len(loc) and tuple(other["loc"][: len(loc)]) == loc for other in errors
    )


def sentence(problem: FieldProblem) -> str:
    """`train.steps is 0: must be 1..1000000000`."""
    if problem.message.startswith(_UNKNOWN):
        return problem.message
    if problem.value is None or isinstance(problem.value, Mapping | list | tuple):
        return f"{problem.field}: {problem.message}" if problem.field else problem.message
    shown = f"{problem.value!r}" if isinstance(problem.value, str) else str(problem.value)
    shown = shown.lower() if isinstance(problem.value, bool) else shown
    return f"{problem.field} is {shown[:80]}: {problem.message}"


def field_name(loc: Iterable[int | str]) -> str:
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "steps"?`, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""


def _problem(error: Mapping[str, Any], model: type[BaseModel] | None) -> FieldProblem:
    # A field may be called "path"; where a request is at fault as a whole, the first word says which part of it.
    where = error["loc"] if model is not None else error["loc"][1:]
    loc = [part for part in where if part != "[key]"]
    # What is said back is also logged by whoever asked.
    kind, value = error["type"], redacted(error.get("input"), str(loc[-1]) if loc else "")
    parent, info = _find(model, loc)
    if kind == "extra_forbidden":
        known = sorted(parent.model_fields) if parent else []
        place = f" of {field_name(loc[:-1])}" if loc[:-1] else ""
        message = f'{_UNKNOWN} "{loc[-1]}"{place}{did_you_mean(str(loc[-1]), known)}'
        return FieldProblem(field=field_name(loc), value=_scalar(value), message=message, allowed=", ".join(known) or None)
    if kind == "missing":
        return FieldProblem(field=field_name(loc), value=None, message="is required", allowed=allowed_of(info))
    allowed = allowed_of(info) or _allowed_by(error)
    message = _WORDS.get(kind) or (f"must be {allowed}" if allowed and kind != "value_error" else _plain(error))
    if allowed and message in ("must be a whole number", "must be a number", "must be a finite number"):
        message = f"must be {allowed}"
    return FieldProblem(field=field_name(loc), value=value, message=message, allowed=allowed)


def allowed_of(info: FieldInfo | None) -> str | None:
    """The allowed values of a field in words, from its annotation: `1..1024`, `fp32 or bf16`, `more than 0`."""
    if info is None:
        return None
    if info.json_schema_extra and isinstance(info.json_schema_extra, dict) and "allowed" in info.json_schema_extra:
        return str(info.json_schema_extra["allowed"])
    annotations, metadata = _leaf(info)
    for annotation in annotations:
        if get_origin(annotation) is Literal:
            return _either([str(choice) for choice in get_args(annotation)])
    low = next((item for item in metadata if isinstance(item, Ge | Gt)), None)
    high = next((item for item in metadata if isinstance(item, Le | Lt)), None)
    if low is None and high is None:
        return _length([item for item in metadata if isinstance(item, MinLen | MaxLen)], text=str in annotations)
    return _range(low, high, whole=int in annotations)


def _range(low: Ge | Gt | None, high: Le | Lt | None, *, whole: bool) -> str:
    noun = "a whole number " if whole else "a number "
    if isinstance(low, Ge) and isinstance(high, Le):
        return f"{noun}{low.ge}..{high.le}"
    words = []
    if low is not None:
        words.append(f"at least {low.ge}" if isinstance(low, Ge) else f"more than {low.gt}")
    if high is not None:
        words.append(f"at most {high.le}" if isinstance(high, Le) else f"less than {high.lt}")
    return noun + " and ".join(words)


def _length(lengths: list[MinLen | MaxLen], *, text: bool) -> str | None:
    noun = "characters" if text else "items"
    least = next((item.min_length for item in lengths if isinstance(item, MinLen)), None)
    most = next((item.max_length for item in lengths if isinstance(item, MaxLen)), None)
    if least is None and most is None:
        return None
    return f"{least or 0}..{most} {noun}" if most is not None else f"at least {least} {noun}"


def _leaf(info: FieldInfo) -> tuple[list[Any], list[Any]]:
    """The plain types a field takes and its constraints, `X | None` and `Annotated` unwrapped."""
    annotations: list[Any] = []
    metadata: list[Any] = list(info.metadata)
    todo: list[Any] = [info.annotation]
    while todo:
        annotation = todo.pop()
        if get_origin(annotation) in (Union, UnionType):
            todo.extend(get_args(annotation))
        elif hasattr(annotation, "__metadata__"):
            inner = FieldInfo.from_annotation(annotation)
            metadata.extend(inner.metadata)
            todo.append(inner.annotation)
        elif annotation is not type(None):
            annotations.append(annotation)
    return annotations, metadata


def _find(model: type[BaseModel] | None, loc: Sequence[int | str]) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """The model that holds the last part of `loc`, and that part's field where there is one."""
    parent, info, left = model, None, list(loc)
    while parent is not None and left:
        info = parent.model_fields.get(str(left.pop(0)))
        if not left or info is None:
            return parent, info
        annotations = _leaf(info)[0]
        held = [inner for annotation in annotations for inner in _held(annotation)]
        if nested := [a for a in annotations if _is_model(a)]:
            parent = nested[0]
        elif (many := [a for a in held if _is_model(a)]) and len(left) > 1:
            parent = many[0]
            left.pop(0)  # which of them
        else:
            return None, info if len(left) == 1 and isinstance(left[0], int) else None
    return None, None


def _held(annotation: Any) -> Sequence[Any]:
    """What a list or a mapping is of."""
    if get_origin(annotation) not in (tuple, list, dict):
        return ()
    inner = [one for one in get_args(annotation) if one is not Ellipsis]
    return _leaf(FieldInfo.from_annotation(inner[-1]))[0] if inner else ()


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _allowed_by(error: Mapping[str, Any]) -> str | None:
    expected = (error.get("ctx") or {}).get("expected")
    return str(expected) if expected else None


def _plain(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def _either(choices: Sequence[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def _scalar(value: object) -> object:
    return value if isinstance(value, str | int | float | bool) else None
