"""What is never shown: values whose name says secret, passwords in URLs, bearer tokens and our own tokens in any text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.domain.secrecy import BLOT, SHORTEST
from orchestrator.notify.signing import PATTERN as _WEBHOOK

from .tokens import PATTERN as _TOKEN

_NAME = re.compile(
    r"(?:^|[_.\-\s])(?:secrets?|passw(?:or)?d|passphrase|token|credentials?|authorization|cookie|api_?key|access_?key"
    r"|private_?key|secret_?key)(?:$|[_.\-\s])",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"(?:_file|_path|_id|_type|s_per_s|_name)$", re.IGNORECASE)
"""They say where a secret is or what of, which is what one has to know."""
_WORD = re.compile(r"(?:^|_)(?:pad|bos|eos|unk|mask|sep|cls|image|start|end|stop|special|additional)_token$", re.IGNORECASE)
# Each of these looks a bounded way from where it may begin: they are held against texts that anybody sends, of a megabyte.
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_PROSE = re.compile(r"(?i)\b(?:bearer|basic)\s+[a-z.-]+(?![A-Za-z0-9._~+/=-])")
"""`basic transformer` is blotted out of what is shown, and refused in no job file."""
_ASSIGNED = re.compile(
    r"(?i)(?<![A-Z0-9])((?:passwd|password|passphrase|secret|token|api_?key|access_?key)(?:[_-][A-Z0-9]{1,64}){0,4})"
    r"([\"']?\s*[=:]\s*[\"']?)(?!\[redacted\])[^\s,;\"']{4,}"
)


def redacted(value: Any, name: str = "") -> Any:
    """The same shape, with what must not be shown blotted out. name: under which it stands."""
    if is_secret_name(name) and value not in (None, "", False, True) and not isinstance(value, int | float):
        return BLOT
    match value:
        case Mapping():
            return {key: redacted(item, str(key)) for key, item in value.items()}
        case list() | tuple():
            return [redacted(item) for item in value]
        case str():
            return redacted_text(value)
        case _:
            return value


def redacted_text(text: str) -> str:
    text = _TOKEN.sub(BLOT, text)
    text = _WEBHOOK.sub(BLOT, text)
    text = _URL_LOGIN.sub(f"{BLOT}@", text)
    text = _BEARER.sub(rf"\1 {BLOT}", text)
    return _ASSIGNED.sub(rf"\1\2{BLOT}", text)


def revealed(value: Any, place: str = "") -> str:
    """The first place in plain JSON where something stands that would not be shown; empty where there is none.

    Words of a vocabulary (`pad_token: "<pad>"`) have names like a secret's, and are none.
    """
    name = re.sub(r"(?:\[\d+\])+$", "", place.rpartition(".")[2])
    match value:
        case Mapping():
            if any(revealed(str(key), "key") for key in value):
                return place or "the whole"  # its keys are not to be said
            return next((at for key, item in value.items() if (at := revealed(item, f"{place}.{key}".lstrip(".")))), "")
        case list() | tuple():
            return next((at for index, item in enumerate(value) if (at := revealed(item, f"{place}[{index}]"))), "")
        case str():
            is_named = is_secret_name(name) and len(value) >= SHORTEST and value != BLOT and not _WORD.search(name)
            words = _PROSE.sub("", value)
            return place if is_named or redacted_text(words) != words else ""
        case _:
            return ""


def is_secret_name(name: str) -> bool:
    # camelCase too: apiKey is api_Key.
    spread = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_NAME.search(spread)) and not _HARMLESS.search(spread)
