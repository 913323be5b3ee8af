"""What webhooks are signed with, as files: `<folder>/<id>`, readable by their owner only, and nowhere else.

Unlike a token's hash a secret has to be read again with each message, so it is kept where the other secrets are: under the
state directory, which every replica of the API sees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.domain.errors import Refused

from .processes import write_private

FOLDER = "webhook-secrets"
"""Under the state directory."""
_ID = re.compile(r"wh-[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class HookSecretFolder:
    root: Path

    def put(self, id: str, secret: str) -> None:
        path = self._path(id)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secret)

    def get(self, id: str) -> str:
        try:
            return self._path(id).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise Refused(f"the secret of webhook {id} cannot be read here; remove the webhook and make it anew") from None

    def remove(self, id: str) -> None:
        self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        if _ID.fullmatch(id) is None:
            raise Refused(f"{id[:100]!r} is no webhook's id; it is wh- and hexadecimal digits")
        return self.root / id
