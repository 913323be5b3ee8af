"""Domain values to JSON and back, exactly, driven by their type annotations.

A dataclass carries its class name under KIND, by which members of a union are told apart; everything else is told by the
annotation alone. Unknown fields are ignored and missing ones take their defaults, so that a reader of the next version can
read what the previous one wrote. The golden files under tests/ hold one of everything.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import threading
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .ids import Device, NodeId

T = TypeVar("T")
Convert = Callable[[Any], Any]
KIND = "$"
"""No field can be called this; `kind` is the name of some."""
_LASTING = {"Profile": 64, "JobSpec": 64, "Plan": 64, "Incident": 256, "FromMemory": 4}
"""Kinds whose values are large, never change and are written again and again, in one record after another; and how many of
each are remembered. Moves of one recovery are soon history, and megabytes."""


class Undecodable(ValueError):
    """Data that no value of the wanted type could have been encoded to."""


def dumps(value: object) -> bytes:
    return json.dumps(encode(value), separators=(",", ":"), allow_nan=True).encode()


def loads(wanted: type[T], data: bytes | str) -> T:
    """Raises Undecodable."""
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise Undecodable(f"not JSON: {error}") from error
    return typing.cast(T, decode(wanted, parsed))


def encode(value: Any) -> Any:
    """A domain value as JSON-able data, not to be changed. Devices are written node/index."""
    kind: Any = type(value)
    return _encoder(kind)(value)


def decode(wanted: Any, data: Any) -> Any:
    """The value of type `wanted` that encodes to `data`. Raises Undecodable."""
    try:
        return _decoder(wanted)(data)
    except Undecodable:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Undecodable(f"{wanted}: {error}") from error


# --- encoders, one per type of value --------------------------------------------------------------------------------------


@cache
def _encoder(kind: Any) -> Convert:
    if issubclass(kind, enum.Enum):
        return lambda value: value.value
    if issubclass(kind, bool | int | float | str | types.NoneType):
        return _same
    if kind is Device:
        return str
    if dataclasses.is_dataclass(kind):
        return _dataclass_encoder(kind)
    if issubclass(kind, Mapping):
        return lambda value: {str(key): encode(item) for key, item in value.items()}
    if issubclass(kind, tuple | list):
        return lambda value: [encode(item) for item in value]
    if issubclass(kind, frozenset | set):
        return lambda value: sorted((encode(item) for item in value), key=json.dumps)
    raise TypeError(f"{kind.__name__} is not a domain value")


def _dataclass_encoder(kind: Any) -> Convert:
    name, fields = kind.__name__, _fields(kind)

    def convert(value: Any) -> Any:
        shaped: dict[str, Any] = {KIND: name}
        for field in fields:
            item = getattr(value, field)
            shaped[field] = encode(item)
        return shaped

    return _remembering(convert, _LASTING[name]) if name in _LASTING else convert


def _remembering(convert: Convert, most: int) -> Convert:
    """Convert each value once; the newest are remembered, by identity. Nobody changes what an encoder gives."""
    known: dict[int, tuple[Any, Any]] = {}  # the value too, so that its identity cannot become another's
    lock = threading.Lock()

    def remembered(value: Any) -> Any:
        found = known.get(id(value))
        if found is not None and found[0] is value:
            return found[1]
        shaped = convert(value)
        with lock:
            known[id(value)] = value, shaped
            while len(known) > most:
                del known[next(iter(known))]
        return shaped

    return remembered


# --- decoders, one per annotation -----------------------------------------------------------------------------------------


@cache
def _decoder(wanted: Any) -> Convert:
    if isinstance(wanted, typing.NewType):
        return _decoder(wanted.__supertype__)
    if wanted in (Any, object, None, types.NoneType):
        return _same
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return _union_decoder(args)
    if origin is Literal:
        return _literal_decoder(args)
    if origin is tuple:
        return _tuple_decoder(args)
    if origin in (list, frozenset, set):
        item = _decoder(args[0])
        return lambda data: origin(map(item, _checked(data, list)))
    if origin is not None and issubclass(origin, Mapping):
        key, item = _key_decoder(args[0]), _decoder(args[1])
        return lambda data: {key(name): item(value) for name, value in _checked(data, dict).items()}
    if wanted is Device:
        return _device
    if dataclasses.is_dataclass(wanted):
        return _dataclass_decoder(wanted)
    if issubclass(wanted, enum.Enum):
        return typing.cast(Convert, wanted)
    if wanted is float:
        return lambda data: float(_checked(data, int | float))
    return lambda data: _checked(data, wanted)


def _union_decoder(members: tuple[Any, ...]) -> Convert:
    tagged = [member for member in members if dataclasses.is_dataclass(member)]
    kinds: dict[str, Any] = {getattr(member, "__name__", ""): member for member in tagged}
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    others = [m for m in members if m is not types.NoneType and m not in tagged and get_origin(m) is not Literal]
    has_none = types.NoneType in members

    def convert(data: Any) -> Any:
        if data is None and has_none:
            return None
        if isinstance(data, dict) and data.get(KIND) in kinds:
            # Looked up when needed: a union may contain itself.
            return _decoder(kinds[data[KIND]])(data)
        if isinstance(data, str) and data in words:
            return data
        if others:
            return _decoder(others[0])(data)
        raise Undecodable(f"{data!r} is none of {', '.join(kinds)}")

    return convert


def _dataclass_decoder(wanted: Any) -> Convert:
    hints = get_type_hints(wanted)
    fields = _fields(wanted)

    def convert(data: Any) -> Any:
        if not isinstance(data, dict):
            raise Undecodable(f"{data!r} is not a {wanted.__name__}")
        return wanted(**{name: _decoder(hints[name])(data[name]) for name in fields if name in data})

    return convert


def _tuple_decoder(args: tuple[Any, ...]) -> Convert:
    if len(args) == 2 and args[1] is Ellipsis:
        item = _decoder(args[0])
        return lambda data: tuple(map(item, _checked(data, list)))
    items = [_decoder(arg) for arg in args]
    return lambda data: tuple(item(value) for item, value in zip(items, _checked(data, list), strict=True))


def _literal_decoder(args: tuple[Any, ...]) -> Convert:
    def convert(data: Any) -> Any:
        if data not in args:
            raise Undecodable(f"{data!r} is not one of {args}")
        return data

    return convert


def _key_decoder(wanted: Any) -> Convert:
    if isinstance(wanted, typing.NewType):
        return _key_decoder(wanted.__supertype__)
    if wanted is Device:
        return _device
    return int if wanted is int else _same


def _device(text: Any) -> Device:
    node, slash, index = _checked(text, str).rpartition("/")
    if not slash:
        raise Undecodable(f"{text!r} is not node/index")
    return Device(NodeId(node), int(index))


def _checked(data: Any, wanted: Any) -> Any:
    if not isinstance(data, wanted) or (isinstance(data, bool) and wanted is not bool):  # a bool is an int to Python
        raise Undecodable(f"{data!r} is not {wanted}")
    return data


def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _same(value: Any) -> Any:
    return value
