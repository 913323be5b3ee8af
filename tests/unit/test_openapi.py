"""The OpenAPI document is whole, and the one the dashboard's client is made from is that of today's routes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from deploy.describe import document

KEPT = Path(__file__).parents[2] / "api" / "web" / "openapi.json"


def test_the_documents_copy_is_up_to_date() -> None:
    assert KEPT.read_text() == document(), "routes or shapes have changed: run make client, and look at what it changes"


def test_every_reference_leads_somewhere() -> None:
    text = document()
    known = json.loads(text)["components"]["schemas"]
    wanted = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text))
    assert wanted <= set(known) and text.count('"$ref"') == len(re.findall(r'"\$ref": "#/components/', text))
    assert {"JobFile", "FaultRequest", "PlanRequest", "JobStepView", "PulseView"} <= set(known)
