"""Secrets as files: `<folder>/<project>/<name>`, one value each, readable by their owner only.

The folder is one that every node sees, or that each has a copy of (a mounted Kubernetes Secret, a RAM disk). Values go
from here into the environment of a job's processes and nowhere else; deploy/secret_files.py or the platform puts them here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.domain.errors import NotFound, Refused
from orchestrator.domain.secrecy import LONGEST, SHORTEST, Veil
from orchestrator.domain.spec import JobSpec

from .processes import write_private

FOLDER = "secrets"
"""Under the state directory."""


@dataclass(frozen=True, slots=True)
class SecretFolder:
    root: Path

    def environment(self, spec: JobSpec) -> dict[str, str]:
        """Of the job's processes, secrets only. Raises Refused, which names a secret and never says what it is."""
        return {variable: self._value(spec.project, name) for variable, name in spec.secrets.items()}

    def veil(self, spec: JobSpec) -> Veil:
        """Over what the job's secrets are now, as far as they can be read."""
        values = []
        for name in spec.secrets.values():
            try:
                values.append(self._value(spec.project, name))
            except Refused:
                continue
        return Veil(values)

    def put(self, project: str, name: str, value: str) -> str:
        """The value that this one replaces, "" for none. Raises Refused where that cannot be a secret's value."""
        _check(project, name, value)
        before = self._before(project, name)
        for folder in (self.root, self.root / project):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.root / project / name, value)
        return before if before != value else ""

    def remove(self, project: str, name: str) -> str:
        """The value it had, "" where that could not be read. Raises NotFound."""
        before = self._before(project, name)
        try:
            (self.root / project / name).unlink()
        except FileNotFoundError:
            raise NotFound(f"project {project} has no secret {name!r}; see everstep secret ls") from None
        return before

    def names(self) -> Iterator[tuple[str, str]]:
        """(project, name) of each, sorted."""
        if not self.root.is_dir():
            return
        for folder in sorted(one for one in self.root.iterdir() if one.is_dir()):
            # A mounted Secret's own bookkeeping begins with dots, as does a file that is being written.
            yield from ((folder.name, one.name) for one in sorted(folder.iterdir()) if not one.name.startswith("."))

    def _before(self, project: str, name: str) -> str:
        try:
            return self._value(project, name)
        except Refused:
            return ""

    def _value(self, project: str, name: str) -> str:
        try:
            # Not stripped but of one line's end: that is the editor's, the rest may be the value's.
            value = (self.root / project / name).read_bytes().removesuffix(b"\n").removesuffix(b"\r").decode()
        except (OSError, UnicodeDecodeError) as error:
            why = "is not there" if isinstance(error, FileNotFoundError) else "cannot be read"
            raise Refused(
                f"secret {name!r} of project {project} {why} on {os.uname().nodename}; put it there with "
                f"everstep secret set {name} --project {project}"
            ) from None
        _check(project, name, value)
        return value


def _check(project: str, name: str, value: str) -> None:
    if not SHORTEST <= len(value) <= LONGEST or "\0" in value:
        raise Refused(
            f"secret {name!r} of project {project} must be {SHORTEST}..{LONGEST} characters of text, so that it can be "
            "kept out of logs; give it another value"
        )
