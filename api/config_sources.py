"""Where a configuration comes from: defaults, then a file, the environment, and flags; each overrides the ones before.

Keeps for every value who said it, so that `everstep config show` can tell and a refusal can name the culprit. Reads the
file and the mapping of variables it is given, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from orchestrator.domain.errors import FieldProblem, Refused

from .config import Config
from .documents import load_mapping
from .refusals import did_you_mean, refusal

TYPES = {
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".toml": "application/toml",
    ".json": "application/json",
}
FILE_VARIABLE = "EVERSTEP_CONFIG"
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """origins: of every value (`api.port`), in words."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Resolved:
    """flags: values by their dotted names, None where one was not given. file: as a flag named it.

    Without a file from a flag or EVERSTEP_CONFIG, `config.yaml`, `.yml`, `.toml` or `.json` of the state directory is read
    where there is one. Raises Refused: fact, place and, for a misspelt name, what was probably meant.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    kinds = dict(leaves())
    for name in given:
        if name not in kinds:
            raise Refused(f'there is no setting "{name}"{did_you_mean(name, kinds)}')
    named = from_environment(environ)
    path = file or (Path(environ[FILE_VARIABLE]) if environ.get(FILE_VARIABLE) else _beside(given, named))
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(kinds, DEFAULT)
    if path is not None:
        merged = read_file(path)
        origins.update(dict.fromkeys(_dotted(merged), f"file {path}"))
    for name, value in named.items():
        _put(merged, name, _shaped(value, kinds[name]))
        origins[name] = f"environment {variable_of(name)}"
    for name, value in given.items():
        _put(merged, name, _shaped(value, kinds[name]))
        origins[name] = f"flag {name}"
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise _with_origins(refusal(error, Config), origins, path) from error
    return Resolved(config=config, origins=origins, file=path)


def read_file(path: Path) -> dict[str, Any]:
    """Raises Refused."""
    kind = TYPES.get(path.suffix.lower())
    if kind is None:
        raise Refused(f"{path} is none of {', '.join(TYPES)}; rename it after what is in it")
    try:
        text = path.expanduser().read_text("utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    if not text.strip():
        return {}
    try:
        return load_mapping(text, kind)
    except Refused as error:
        raise Refused(f"{path}: {error.message}", error.problems) from error


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Values by dotted name. Raises Refused for a variable that begins like a section's and names nothing."""
    names = {variable_of(name): name for name, _ in leaves()}
    sections = tuple(
        f"EVERSTEP_{name.upper()}_" for name, kind in Config.model_fields.items() if _is_section(kind.annotation)
    )
    for variable in sorted(environ):
        if variable.startswith(sections) and variable not in names:
            raise Refused(f"there is no setting {variable}{did_you_mean(variable, names)}")
    return {name: environ[variable] for variable, name in names.items() if variable in environ}


def variable_of(name: str) -> str:
    """`EVERSTEP_API_PORT` for `api.port`."""
    return "EVERSTEP_" + name.replace(".", "_").upper()


def leaves(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting's dotted name and annotation."""
    for name, info in model.model_fields.items():
        if _is_section(info.annotation):
            assert isinstance(info.annotation, type)
            yield from leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info.annotation


def value_of(config: Config, name: str) -> Any:
    """As JSON has it; a secret as stars."""
    found: Any = config.model_dump(mode="json")
    for part in name.split("."):
        found = found[part]
    return found


def _beside(flags: Mapping[str, Any], named: Mapping[str, str]) -> Path | None:
    default: Path = Config.model_fields["state_dir"].default
    folder = Path(flags.get("state_dir") or named.get("state_dir") or default).expanduser()
    found = [path for suffix in TYPES if (path := folder / f"config{suffix}").is_file()]
    if len(found) > 1:
        raise Refused(f"{' and '.join(map(str, found))} are both there; keep one, or name it with --config")
    return found[0] if found else None


def _shaped(value: Any, annotation: Any) -> Any:
    """Text of the environment or a flag as what the field takes: lists by commas, `null` and nothing as none."""
    if not isinstance(value, str):
        return value
    origins = {get_origin(one) or one for one in _kinds(annotation)}
    if tuple in origins:
        return [part.strip() for part in value.split(",") if part.strip()]
    if type(None) in origins and value in ("", "null"):
        return None
    return value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _dotted(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _put(mapping: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        inner = mapping.get(section)
        # What is no section is left for the model to refuse.
        mapping = inner if isinstance(inner, dict) else mapping.setdefault(section, {})
        if not isinstance(mapping, dict):
            return
    mapping[last] = value


def _with_origins(refused: Refused, origins: Mapping[str, str], path: Path | None) -> Refused:
    """The same, saying who said it."""

    def where(problem: FieldProblem) -> str:
        name = problem.field.partition("[")[0]
        return origins.get(name) or (f"file {path}" if path is not None else "")

    said = where(refused.problems[0]) if refused.problems else ""
    suffix = f" ({said})" if said and said != DEFAULT else ""
    return Refused(refused.message + suffix, refused.problems)
