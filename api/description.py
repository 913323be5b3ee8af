"""The OpenAPI document: what FastAPI makes of the routes, and what it cannot see of them.

Bodies that `body_of` reads and messages of event streams are declared by name in the routes; their shapes, and the shapes
in those, are put among the components here, so that every reference leads somewhere and a client can be generated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"


def describe(app: FastAPI, asked: Iterable[type[BaseModel]], told: Iterable[type[BaseModel]]) -> None:
    """asked: bodies of requests; told: what streams carry. The document is made when it is first wanted."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            found["components"]["schemas"] |= _shapes(asked, "validation") | _shapes(told, "serialization")
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


def _shapes(models: Iterable[type[BaseModel]], mode: Any) -> dict[str, Any]:
    _, found = models_json_schema([(model, mode) for model in models], ref_template=REF)
    shapes: dict[str, Any] = found.get("$defs", {})
    return shapes
