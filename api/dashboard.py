"""The dashboard's files: one page for every address of it, assets whose names change with their contents.

Knows where the package's own build puts them, and what to say where that build was skipped. Never speaks to the store.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

BUILT = Path(__file__).parent / "static"
PAGES = ("/", "/jobs", "/jobs/{rest:path}", "/nodes", "/plans", "/webhooks", "/webhooks/{rest:path}", "/faults")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "worker-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Everstep: no dashboard</title>
<h1>This server has no dashboard</h1>
<p>Its package was built without one: EVERSTEP_SKIP_DASHBOARD was set, or the source tree was never installed.
Install it without that variable (<code>pip install .</code>) and start the server again.</p>
<p>The API is here all the same: <a href="/openapi.json">/openapi.json</a>, and so are the commands of
<code>everstep</code>.</p>
</html>
"""


class _Assets(StaticFiles):
    """Their names hold a hash of what is in them, so a copy is good for ever."""

    async def check_config(self) -> None:
        """Where nothing was built there is no folder, and nothing in it."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        answer.headers["Content-Security-Policy"] = POLICY
        return answer


def is_page(path: str) -> bool:
    """Whether it is the dashboard's: what anybody may read, because nothing is in it."""
    return path in PAGES or path.startswith(("/jobs/", "/webhooks/", "/assets/"))


def install(app: FastAPI, built: Path = BUILT) -> None:
    """After every route of the API."""

    async def page() -> Response:
        index = built / "index.html"
        if not index.is_file():
            return HTMLResponse(_NOT_BUILT, status_code=501, headers=_HEADERS)
        return FileResponse(index, media_type="text/html", headers=_HEADERS)

    for path in PAGES:
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/assets", _Assets(directory=built / "assets", check_dir=False), name="assets")
