"""Domain values to JSON and back, exactly, driven by their type annotations.

A value whose annotated type is a union of dataclasses carries its class name under "kind"; everything else is told by the
annotation alone. Unknown fields are ignored and missing ones take their defaults, so that a reader of the next version can
read what the previous one wrote. The golden files under tests/ hold one of everything.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .ids import Device, NodeId

T = TypeVar("T")
KIND = "kind"


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
    """A domain value as JSON-able data. Dataclasses carry their class name, which unions need; a device is node/index."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, Device):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shaped: dict[str, Any] = {KIND: type(value).__name__}
        for name in _encodable(type(value)):
            shaped[name] = encode(getattr(value, name))
        return shaped
    if isinstance(value, Mapping):
        return {_key(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted((encode(item) for item in value), key=json.dumps)
    raise TypeError(f"{type(value).__name__} is not a domain value")


def decode(wanted: Any, data: Any) -> Any:
    """The value of type `wanted` that encodes to `data`. Raises Undecodable."""
    try:
        return _decode(wanted, data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise error if isinstance(error, Undecodable) else Undecodable(f"{wanted}: {error}") from error


def _decode(wanted: Any, data: Any) -> Any:
    if isinstance(wanted, typing.NewType):
        return _decode(wanted.__supertype__, data)
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted is Any or wanted is object or wanted is None or wanted is type(None):
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(args, data)
    if origin is Literal:
        if data not in args:
            raise Undecodable(f"{data!r} is not one of {args}")
        return data
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], item) for item in data)
        if len(args) != len(data):
            raise Undecodable(f"{len(data)} items where {len(args)} belong")
        return tuple(_decode(arg, item) for arg, item in zip(args, data, strict=True))
    if origin in (list, frozenset, set):
        return origin(_decode(args[0], item) for item in data)
    if origin is not None and issubclass(origin, Mapping):
        return {_unkey(args[0], key): _decode(args[1], item) for key, item in data.items()}
    if wanted is Device:
        return _device(data)
    if dataclasses.is_dataclass(wanted):
        return _decode_dataclass(wanted, data)
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return wanted(data)
    if wanted is float and isinstance(data, int):
        return float(data)
    if isinstance(wanted, type) and isinstance(data, wanted):
        return data
    raise Undecodable(f"{data!r} is not {wanted}")


def _decode_union(members: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in members:
        return None
    if isinstance(data, dict) and KIND in data:
        for member in members:
            if dataclasses.is_dataclass(member) and getattr(member, "__name__", "") == data[KIND]:
                return _decode_dataclass(member, data)
    for member in members:
        if not dataclasses.is_dataclass(member) and member is not type(None):
            return _decode(member, data)
    raise Undecodable(f"{data!r} is none of {[getattr(m, '__name__', m) for m in members]}")


def _decode_dataclass(wanted: Any, data: Any) -> Any:
    hints = _hints(wanted)
    return wanted(**{name: _decode(hints[name], data[name]) for name in _encodable(wanted) if name in data})


@cache
def _encodable(wanted: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(wanted) if field.init)


@cache
def _hints(wanted: type) -> dict[str, Any]:
    return get_type_hints(wanted)


def _key(key: Any) -> str:
    return str(key)


def _unkey(wanted: Any, key: str) -> Any:
    if isinstance(wanted, typing.NewType):
        return _unkey(wanted.__supertype__, key)
    if wanted is Device:
        return _device(key)
    if isinstance(wanted, type) and issubclass(wanted, int):
        return wanted(key)
    return key


def _device(text: str) -> Device:
    node, _, index = text.rpartition("/")
    return Device(NodeId(node), int(index))
