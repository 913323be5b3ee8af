"""The API's OpenAPI document, as the dashboard's client is generated from it: `make client`."""

from __future__ import annotations

import json
from pathlib import Path

from api.app import create_app
from api.settings import ApiSettings
from orchestrator.adapters.memory import MemoryStore


def document() -> str:
    app = create_app(MemoryStore(lambda: 0.0), ApiSettings(state_dir=Path("/")))
    return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(document(), end="")
