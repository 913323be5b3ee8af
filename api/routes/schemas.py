"""JSON Schemas of the files that people write, for editors and for checks before anything is sent."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from .. import config
from ..schemas import JobFile

router = APIRouter(prefix="/api/v1/schemas", tags=["schemas"])
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@router.get("/config")
async def config_schema() -> dict[str, Any]:
    """Of the service's configuration."""
    return config.schema()


@router.get("/job")
async def job_schema() -> dict[str, Any]:
    """Of a job file."""
    return {"$schema": DIALECT, **JobFile.model_json_schema()}
