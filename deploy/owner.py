"""The token of whoever owns a state folder: made once, readable by its owner alone, and what `everstep` asks with there.

It is the cluster's root: remove the file and start the API again to have another one.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from api.config import is_loopback
from api.tokens import FILE, is_whole, mint
from orchestrator.domain.errors import Conflict, Refused


def own_token(state_dir: Path) -> str:
    """Of this folder, made where there is none. Raises Conflict for a file that is no token or that others can read."""
    path = state_dir / FILE
    if not path.exists():
        _make(path)
    if path.stat().st_mode & 0o077:
        raise Conflict(f"{path} can be read by others, so anybody may own this cluster; remove it and start again")
    text = path.read_text().strip()
    if not is_whole(text):
        raise Conflict(f"{path} holds no token; remove it and start again")
    return text


def _make(path: Path) -> None:
    """Born with its mode, and complete under its name: another process may be reading it, or making it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # By no pid: in two containers that share the folder they are the same.
    fresh = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(mint())
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()


def require_auth(host: str, has_auth: bool) -> None:
    """Raises Refused for an address that others can reach where nobody is asked who they are."""
    if not has_auth and not is_loopback(host):
        raise Refused(
            f"this API runs programs for whoever reaches it, {host} can be reached by others, and auth is off; "
            "turn auth on or listen on 127.0.0.1"
        )
