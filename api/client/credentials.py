"""Which token goes with which server: given, of the environment, or of a server that this user has started.

    argument > EVERSTEP_TOKEN > EVERSTEP_TOKEN_FILE > the state folder of the server that runs at that very address

A server's address and folder are noted in the user's own state directory while it runs. A token is sent to nobody else:
the note must agree with the folder's server.json, and the process named there must be alive.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from api.tokens import FILE

TOKEN, TOKEN_FILE = "EVERSTEP_TOKEN", "EVERSTEP_TOKEN_FILE"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def find_token(url: str, given: str | None = None) -> str | None:
    """None where nothing is known; the server will say that it wants one."""
    if given:
        return given.strip()
    if named := os.environ.get(TOKEN, "").strip():
        return named
    if file := os.environ.get(TOKEN_FILE, ""):
        return _read(Path(file).expanduser())
    folder = _folder_of(url)
    return _read(folder / FILE) if folder else None


def headers_for(url: str, given: str | None = None) -> dict[str, str]:
    """What authorizes a request there, if anything does."""
    token = find_token(url, given)
    return {"Authorization": f"Bearer {token}"} if token else {}


def note_server(url: str, state_dir: Path) -> None:
    """Have this user's clients find the token of a server that has just been started; best effort."""
    with suppress(OSError):
        path = _note_of(url)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps({"url": url, "state_dir": str(state_dir)}))


def forget_server(url: str) -> None:
    with suppress(OSError):
        _note_of(url).unlink(missing_ok=True)


def _folder_of(url: str) -> Path | None:
    """The state folder of the server that runs there, as far as this user started it."""
    if urlsplit(url).hostname not in LOOPBACK:
        return None
    try:
        note = json.loads(_note_of(url).read_text())
        folder = Path(note["state_dir"])
        server = json.loads((folder / "server.json").read_text())
        os.kill(int(server["pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if _port(server["url"]) == _port(url) else None


def _note_of(url: str) -> Path:
    root = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return root / "everstep" / "servers" / f"{_port(url)}.json"


def _port(url: str) -> int:
    return urlsplit(url).port or 80


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
