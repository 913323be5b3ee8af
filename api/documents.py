"""Text that users send, as plain JSON-able mappings: JSON, TOML, or YAML without its surprises.

Refused, with the place: duplicate keys, aliases (a small text could unfold into a huge one), dates and other tags, numbers
that JSON does not have, nesting beyond 50 levels. What the mapping means is for schemas.py.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Hashable
from typing import Any

import yaml

from orchestrator.domain.errors import FieldProblem, Refused

MAX_DEPTH = 50
JSON_TYPES = ("application/json", "text/json")
TOML_TYPES = ("application/toml",)
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


class UnsupportedType(Refused):
    """A content type that is none of JSON, YAML and TOML."""


def load_mapping(text: str, content_type: str) -> dict[str, Any]:
    """The one mapping in `text`. Raises Refused."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in JSON_TYPES or kind.endswith("+json"):
        loaded = _from_json(text)
    elif kind in YAML_TYPES:
        loaded = _from_yaml(text)
    elif kind in TOML_TYPES:
        loaded = _from_toml(text)
    else:
        said = f"content type {kind!r}" if kind else "no content type"
        raise UnsupportedType(f"{said} cannot be read; send application/json or application/yaml, or application/toml")
    if not isinstance(loaded, dict):
        found = "nothing" if loaded is None else f"a {type(loaded).__name__}"
        raise Refused(f"the body must be a mapping of settings, not {found}")
    _check(loaded, "", 0)
    return loaded


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Refused(f"not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise Refused(_too_deep()) from error
    except ValueError as error:
        raise Refused(f"not JSON: {error}") from error


def _from_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise Refused(f"not YAML{place}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise Refused(f"not YAML: {error}") from error
    except RecursionError as error:
        raise Refused(_too_deep()) from error
    except ValueError as error:
        raise Refused(f"not YAML: {error}") from error


def _from_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"not TOML: {error}") from error
    except RecursionError as error:
        raise Refused(_too_deep()) from error


class _Loader(yaml.SafeLoader):
    """YAML whose every value JSON can hold too."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not read; write the value out", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} must be text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f'"{key.value}" is given twice', problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# Of YAML 1.2 the core words only, as in JSON: dates, 12:30, yes and 010 stay text, and 3e-4 is a number.
_NUMBER = r"(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _firsts in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", rf"[-+]?{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _firsts)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    shaped: dict[str, Any] = {}
    for key, value in pairs:
        if key in shaped:
            raise Refused(f'"{key}" is given twice')
        shaped[key] = value
    return shaped


def _check(value: Any, place: str, depth: int) -> None:
    """Refuse what could not be stored and read back exactly as JSON."""
    if depth > MAX_DEPTH:
        raise Refused(_too_deep())
    match value:
        case dict():
            for key, item in value.items():
                if _is_no_text(str(key)):
                    raise Refused(f"a key of {place or 'the whole'} holds a character that is not text")
                _check(item, f"{place}.{key}" if place else str(key), depth + 1)
        case list():
            for index, item in enumerate(value):
                _check(item, f"{place}[{index}]", depth + 1)
        case float() if not math.isfinite(value):
            problem = FieldProblem(field=place, value=str(value), message="must be a finite number")
            raise Refused(f"{place} is {value}: must be a finite number", (problem,))
        case str() if _is_no_text(value):
            raise Refused(f"{place} holds a character that is not text")
        case None | bool() | int() | float() | str():
            pass
        case _:
            raise Refused(f"{place} holds a {type(value).__name__}, which JSON does not have; write it as text")


def _is_no_text(text: str) -> bool:
    return "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)


def _too_deep() -> str:
    return f"nested more than {MAX_DEPTH} levels deep; flatten it"
