"""What is installed is what was meant: no version with a flaw that is known, nothing fetched that was not locked."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.bom import EXTRAS, ROOT, bill, closure, licence_of, pins

TOP = Path(__file__).parents[2]
ADVISORIES: list[dict[str, str]] = yaml.safe_load((TOP / "deploy/advisories.yaml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
LOCK: dict[str, Any] = json.loads((TOP / "api/web/package-lock.json").read_text())


@cache
def pinned() -> dict[str, Version]:
    lines = (TOP / "deploy/constraints.txt").read_text().splitlines()
    found = {name: Version(at) for name, at in (line.split("==") for line in lines)}
    assert len(found) == len(lines), "each once"
    return found


def asked_for(*extras: str) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in [*PROJECT["dependencies"], *(one for extra in extras for one in optional[extra])]]


def lowest(need: Requirement) -> Version:
    """0 where nothing keeps old versions out."""
    return max((Version(one.version) for one in need.specifier if one.operator in (">=", "~=", "==")), default=Version("0"))


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda advisory: advisory["id"])
def test_no_version_with_a_known_flaw_can_be_installed(advisory: dict[str, str]) -> None:
    name, mended = advisory["package"], Version(str(advisory["mended"]))
    needs = [need for need in asked_for(*PROJECT["optional-dependencies"]) if canonicalize_name(need.name) == name]
    assert needs, f"pyproject.toml does not name {name}, so that any version of it may come along"
    assert all(lowest(need) >= mended for need in needs), f"{name} before {mended} is allowed: {advisory['what']}"
    assert pinned()[name] >= mended
    assert Version(version(name)) >= mended


def test_the_image_pins_everything_that_is_asked_for_within_what_is_allowed() -> None:
    for need in asked_for(*EXTRAS):
        at = pinned()[canonicalize_name(need.name)]
        assert need.specifier.contains(at, prereleases=True), f"{need}, and {at} is pinned; make pins"


def test_all_of_the_page_is_compared_with_a_hash_that_was_locked() -> None:
    packages = {path: about for path, about in LOCK["packages"].items() if path}
    assert len(packages) > 20
    assert not [path for path, about in packages.items() if not about["integrity"].startswith("sha512-")]
    wanted = json.loads((TOP / "api/web/package.json").read_text())
    for name, at in (wanted["dependencies"] | wanted["devDependencies"]).items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", at), f"{name} is no exact version"
        assert packages[f"node_modules/{name}"]["version"] == at


def test_the_bill_of_materials_is_one_and_names_all_that_is_installed() -> None:
    found = closure(ROOT, EXTRAS)
    made = bill(found, LOCK)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(made)) is None
    names = {one["name"] for one in made["components"]}
    assert {"ray", "redis", "torch", "fastapi", "starlette", "grpcio", "preact", "uplot"} <= names
    inside = {one["name"] for one in made["components"] if one["purl"].startswith("pkg:npm/") and one.get("scope") is None}
    assert "preact" in inside and "axe-core" not in inside
    (ours,) = [one["dependsOn"] for one in made["dependencies"] if one["ref"] == made["metadata"]["component"]["bom-ref"]]
    assert any(one.startswith("pkg:pypi/starlette@") for one in ours)
    assert len(list(pins(found))) == len(found) - 1


def test_no_package_asks_for_the_sources_of_what_it_is_used_in() -> None:
    found = {name: licence_of(one) for name, one in closure(ROOT, EXTRAS).items() if name != ROOT}
    assert found["fastapi"] == "MIT"
    # LGPL, MPL and the like ask for their own.
    assert not {name: said for name, said in found.items() if re.search(r"\bA?GPL|Affero|SSPL|\bGeneral Public", said)}
