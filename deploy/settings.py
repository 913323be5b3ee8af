"""Where a local cluster keeps what: one state directory, and fixed places in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.adapters.processes import ProcessId, read_pid, write_private


@dataclass(frozen=True, slots=True)
class Places:
    """Everything is under state_dir, so that removing it removes the cluster's memory."""

    state_dir: Path

    def create(self) -> None:
        for folder in (self.state_dir, self.logs, self.run):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def logs(self) -> Path:
        return self.state_dir / "log"

    @property
    def run(self) -> Path:
        """Pid files of the keeper and of what it keeps."""
        return self.state_dir / "run"

    @property
    def lock(self) -> Path:
        return self.state_dir / "up.lock"

    @property
    def server(self) -> Path:
        """What clients read: the API's address. Written once everything is ready."""
        return self.state_dir / "server.json"

    def pid_file(self, name: str) -> Path:
        return self.run / f"{name}.json"

    def process(self, name: str) -> ProcessId | None:
        """The living process of this name."""
        found = read_pid(self.pid_file(name))
        return found if found and found.is_alive else None

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def last_words(self, name: str, lines: int = 3) -> str:
        try:
            said = self.log(name).read_text(errors="replace").strip().splitlines()
        except OSError:
            said = []
        return " | ".join(said[-lines:]) or "it said nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Contents of server.json. pid: of the keeper."""

    url: str
    pid: int
    state_dir: str

    def write(self, path: Path) -> None:
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Server | None:
        try:
            found = json.loads(path.read_text())
            return cls(url=str(found["url"]), pid=int(found["pid"]), state_dir=str(found["state_dir"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
