"""What a service is made of: every package that an installation pulls in, as a bill of materials or as exact versions.

    python -m deploy.bom [--web api/web/package-lock.json]     CycloneDX 1.6, JSON: Python packages, and the page's from npm
    python -m deploy.bom --pins                                NAME==VERSION, for pip's --constraint

It reads what is installed, so it tells of this machine and asks no registry.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT, EXTRAS = "everstep", ("server", "worker")
DEVELOPED = "excluded"
"""CycloneDX's word for what builds the product and is no part of it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--web", type=Path, help="the page's lock file")
    parser.add_argument("--pins", action="store_true")
    asked = parser.parse_args()
    found = closure(ROOT, EXTRAS)
    if asked.pins:
        sys.stdout.write("".join(f"{line}\n" for line in pins(found)))
        return
    lock = json.loads(asked.web.read_text()) if asked.web else {}
    json.dump(bill(found, lock), sys.stdout, indent=1)


def closure(name: str, extras: Iterable[str]) -> dict[str, Distribution]:
    """By canonical name, what is installed of everything that it needs on this machine, itself included.

    Raises PackageNotFoundError where something of it is not installed.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        wanted, extra = waiting.pop()
        key = canonicalize_name(wanted)
        if (key, extra) in seen:
            continue
        seen.add((key, extra))
        found.setdefault(key, distribution(wanted))
        for need in _needs(found[key], extra):
            waiting += [(need.name, one) for one in ("", *need.extras)]
    return dict(sorted(found.items()))


def pins(found: Mapping[str, Distribution]) -> Iterator[str]:
    """Without the local part of a version, which only one index has."""
    for name, one in found.items():
        if name != ROOT:
            yield f"{name}=={one.version.split('+')[0]}"


def bill(found: Mapping[str, Distribution], lock: Mapping[str, Any]) -> dict[str, Any]:
    """lock: npm's package-lock, empty for none."""
    ref = {name: f"pkg:pypi/{name}@{quote(one.version, safe='')}" for name, one in found.items()}
    ours = {"type": "application", "bom-ref": ref[ROOT], "purl": ref[ROOT], "name": ROOT, "version": found[ROOT].version}
    others = [_python(name, one, ref[name]) for name, one in found.items() if name != ROOT]
    web = [_npm(path, about) for path, about in sorted(lock.get("packages", {}).items()) if path]
    needed = {
        name: sorted({ref[key] for key in _direct(name, one) if key in ref and key != name}) for name, one in found.items()
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": [*others, *web],
        "dependencies": [{"ref": ref[name], "dependsOn": needs} for name, needs in needed.items()],
    }


def _direct(name: str, one: Distribution) -> Iterator[str]:
    for extra in ("", *(EXTRAS if name == ROOT else ())):
        yield from (canonicalize_name(need.name) for need in _needs(one, extra))


def _needs(one: Distribution, extra: str) -> Iterator[Requirement]:
    for text in one.requires or ():
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": extra}):
            yield need


def _python(name: str, one: Distribution, ref: str) -> dict[str, Any]:
    licence = licence_of(one)
    shown = {"type": "library", "bom-ref": ref, "purl": ref, "name": name, "version": one.version}
    return shown | ({"licenses": [{"license": {"name": licence}}]} if licence else {})


def licence_of(one: Distribution) -> str:
    """As its authors say; "" where they don't."""
    said = {name: one.metadata.get_all(name) or [] for name in ("License-Expression", "License", "Classifier")}
    first = [text.strip().split("\n")[0] for text in (*said["License-Expression"], *said["License"])]
    classes = [line.rpartition(" :: ")[2] for line in said["Classifier"] if line.startswith("License ::")]
    return next(filter(None, first), ", ".join(classes))


def _npm(path: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """integrity is `sha512-BASE64`: what npm compares a download with, and so what went into the page."""
    name, version = path.rpartition("node_modules/")[2], about["version"]
    kind, _, digest = about["integrity"].partition("-")
    ref = f"pkg:npm/{quote(name, safe='/')}@{version}"
    shown = {"type": "library", "bom-ref": f"{ref}#{path}", "purl": ref, "name": name, "version": version}
    shown["hashes"] = [{"alg": f"SHA-{kind.removeprefix('sha')}", "content": base64.b64decode(digest).hex()}]
    return shown | ({"scope": DEVELOPED} if about.get("dev") else {})


if __name__ == "__main__":
    main()
