"""What changed between two OpenAPI documents, and whether a client of the older one still works:
`python -m deploy.api_diff OLD NEW`.

Breaking is what a program written for OLD may stumble over: a route, an answer or a field of one that is gone, a request
that was right and is refused now. What is only more is not: readers ignore what they do not know (api/views.py).
Words (descriptions, titles, examples, defaults of answers) are no part of the promise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Way = Literal["asked", "told"]
"""Whether a shape is one that clients send, or one that they read."""
Shape = Mapping[str, Any]
_BOUNDS = {"minimum": max, "exclusiveMinimum": max, "minLength": max, "minItems": max}
_BOUNDS |= {"maximum": min, "exclusiveMaximum": min, "maxLength": min, "maxItems": min}
_METHODS = ("get", "put", "post", "patch", "delete")


@dataclass(frozen=True, slots=True, order=True)
class Change:
    is_breaking: bool
    where: str
    what: str

    def __str__(self) -> str:
        return f"{'BREAKING' if self.is_breaking else 'added   '} {self.where}: {self.what}"


def changes(old: Shape, new: Shape) -> list[Change]:
    """Breaking ones first."""
    found = set(_Comparison(old, new).of_routes())
    return sorted(found, key=lambda change: (not change.is_breaking, change.where, change.what))


class _Comparison:
    def __init__(self, old: Shape, new: Shape) -> None:
        self._old, self._new = old, new
        self._under_way: set[tuple[str, str, Way]] = set()
        """Shapes that hold themselves are compared once."""

    def of_routes(self) -> Iterator[Change]:
        before, now = _routes(self._old), _routes(self._new)
        for name in sorted(before.keys() | now.keys()):
            if name not in now:
                yield Change(True, name, "is gone")
            elif name not in before:
                yield Change(False, name, "is new")
            else:
                yield from self._of_route(name, before[name], now[name])

    def _of_route(self, name: str, old: Shape, new: Shape) -> Iterator[Change]:
        yield from self._of_parameters(name, _parameters(old), _parameters(new))
        body, body_now = _contents(old.get("requestBody", {})), _contents(new.get("requestBody", {}))
        if not body and body_now and new["requestBody"].get("required"):
            yield Change(True, name, "needs a body now")
        yield from self._of_contents(f"{name} body", body, body_now, "asked")
        for code, answer in old.get("responses", {}).items():
            if code not in new.get("responses", {}):
                yield Change(code.startswith("2"), f"{name} {code}", "is answered no more")
            else:
                there = _contents(new["responses"][code])
                yield from self._of_contents(f"{name} {code}", _contents(answer), there, "told")

    def _of_parameters(self, name: str, old: Mapping[str, Shape], new: Mapping[str, Shape]) -> Iterator[Change]:
        for key in sorted(old.keys() | new.keys()):
            where = f"{name} {key}"
            if key not in new:
                yield Change(True, where, "is not read any more")
            elif key not in old:
                is_required = bool(new[key].get("required"))
                yield Change(is_required, where, "is needed now" if is_required else "is new")
            else:
                if new[key].get("required") and not old[key].get("required"):
                    yield Change(True, where, "is needed now")
                yield from self._of_shapes(where, old[key].get("schema", {}), new[key].get("schema", {}), "asked")

    def _of_contents(self, where: str, old: Mapping[str, Shape], new: Mapping[str, Shape], way: Way) -> Iterator[Change]:
        for kind in sorted(old.keys() | new.keys()):
            if kind not in new:
                yield Change(True, where, f"is {kind} no more")
            elif kind not in old:
                yield Change(False, where, f"may be {kind}")
            else:
                yield from self._of_shapes(where, old[kind], new[kind], way)

    def _of_shapes(self, where: str, old: Shape, new: Shape, way: Way) -> Iterator[Change]:
        pair = (str(old.get("$ref", "")), str(new.get("$ref", "")), way)
        if any(pair[:2]):
            if pair in self._under_way:
                return
            self._under_way.add(pair)
        old, new = _resolved(self._old, old), _resolved(self._new, new)
        kinds, kinds_now = _kinds(self._old, old), _kinds(self._new, new)
        gone, added = kinds.keys() - kinds_now.keys(), kinds_now.keys() - kinds.keys()
        if gone and kinds_now and way == "asked":
            yield Change(True, where, f"may not be {', '.join(sorted(gone))} any more")
        if added and kinds:
            is_breaking = way == "told" or not (kinds.keys() & kinds_now.keys())
            yield Change(is_breaking, where, f"may be {', '.join(sorted(added))} now")
        for kind in sorted(kinds.keys() & kinds_now.keys()):
            yield from self._of_kind(where, kinds[kind], kinds_now[kind], way)

    def _of_kind(self, where: str, old: Shape, new: Shape, way: Way) -> Iterator[Change]:
        yield from _of_values(where, old, new, way)
        if "items" in old and "items" in new:
            yield from self._of_shapes(f"{where}[]", old["items"], new["items"], way)
        fields, fields_now = old.get("properties", {}), new.get("properties", {})
        needed, needed_now = set(old.get("required", ())), set(new.get("required", ()))
        for name in sorted(fields.keys() | fields_now.keys()):
            at = f"{where}.{name}"
            if name not in fields_now:
                yield Change(True, at, "is gone")
            elif name not in fields:
                is_breaking = way == "asked" and name in needed_now
                yield Change(is_breaking, at, "is needed now" if is_breaking else "is new")
            else:
                if way == "asked" and name in needed_now - needed:
                    yield Change(True, at, "is needed now")
                if way == "told" and name in needed - needed_now:
                    yield Change(True, at, "may be left out now")
                yield from self._of_shapes(at, fields[name], fields_now[name], way)


def _of_values(where: str, old: Shape, new: Shape, way: Way) -> Iterator[Change]:
    if "enum" in old and "enum" in new:
        gone, added = set(old["enum"]) - set(new["enum"]), set(new["enum"]) - set(old["enum"])
        if gone:
            yield Change(way == "asked", where, f"is never {', '.join(map(str, sorted(gone)))} any more")
        if added:
            yield Change(False, where, f"may be {', '.join(map(str, sorted(added)))}")
    if way == "asked":
        if "enum" in new and "enum" not in old:
            yield Change(True, where, "is one of few now")
        for name, tighter in _BOUNDS.items():
            if name in new and new[name] != old.get(name) and tighter(new[name], old.get(name, new[name])) == new[name]:
                yield Change(True, where, f"has {name} {new[name]} now")
        if new.get("pattern") != old.get("pattern") and "pattern" in new:
            yield Change(True, where, f"must look like {new['pattern']} now")
        if old.get("additionalProperties", True) is not False and new.get("additionalProperties") is False:
            yield Change(True, where, "takes no other fields now")


def _routes(document: Shape) -> dict[str, Shape]:
    return {
        f"{method.upper()} {path}": item[method]
        for path, item in document["paths"].items()
        for method in _METHODS
        if method in item
    }


def _parameters(route: Shape) -> dict[str, Shape]:
    return {f"{one['in']} {one['name']}": one for one in route.get("parameters", ())}


def _contents(holder: Shape) -> dict[str, Shape]:
    return {kind: content.get("schema", {}) for kind, content in holder.get("content", {}).items()}


def _resolved(document: Shape, shape: Shape) -> Shape:
    while "$ref" in shape:
        shape = document["components"]["schemas"][shape["$ref"].rpartition("/")[2]]
    return shape


def _kinds(document: Shape, shape: Shape) -> dict[str, Shape]:
    """Each alternative of a shape by its JSON type; of two objects, by their titles. {}: anything."""
    found: dict[str, Shape] = {}
    options = shape.get("anyOf") or shape.get("oneOf") or (shape,)
    for option in options:
        option = _resolved(document, option)
        if option is not shape and ("anyOf" in option or "oneOf" in option):
            found |= _kinds(document, option)
            continue
        named = option.get("type", [])
        for kind in [named] if isinstance(named, str) else named:
            is_one_of_several = kind == "object" and len(options) > 1 and "title" in option
            found[option["title"] if is_one_of_several else kind] = option
    return found


def main() -> int:
    """Exit status 1 where something breaks."""
    old, new = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    found = changes(old, new)
    print("\n".join(map(str, found)) or "no change")
    return int(any(change.is_breaking for change in found))


if __name__ == "__main__":
    sys.exit(main())
