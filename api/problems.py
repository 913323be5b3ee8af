"""Every error of the API, as RFC 9457 problem+json: what kind, one clear sentence, and the fields at fault.

Nothing else in the API builds an error answer. Types are stable URNs; `errors` names field, value and allowed range.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from orchestrator.domain.errors import Conflict, EverstepError, FieldProblem, NotFound, Outdated, Refused, Unavailable

from .refusals import field_name, problems_of, sentence

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:everstep:problem:"
log = logging.getLogger(__name__)


class Problem(Exception):
    """An error answer, ready to be sent. kind: the last part of its type URI."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.errors, self.headers, self.extra = tuple(errors), dict(headers or {}), extra

    def body(self, request_id: str = "") -> dict[str, Any]:
        shaped: dict[str, Any] = {
            "type": TYPE_PREFIX + self.kind,
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        if self.errors:
            shaped["errors"] = [shape_field(problem) for problem in self.errors]
        if request_id:
            shaped["request_id"] = request_id
        return shaped | self.extra

    def response(self, request_id: str = "") -> Response:
        return JSONResponse(self.body(request_id), self.status, self.headers, media_type=MEDIA_TYPE)


def not_found(detail: str) -> Problem:
    return Problem(404, "not-found", detail)


def conflict(detail: str) -> Problem:
    return Problem(409, "conflict", detail)


def invalid(field: str, value: object, message: str, allowed: str | None = None, status: int = 422) -> Problem:
    problem = FieldProblem(field=field, value=value, message=message, allowed=allowed)
    return Problem(status, "invalid", sentence(problem), errors=[problem])


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem, those of routing and validation and bugs included."""

    async def answer(request: Request, error: Exception) -> Response:
        return problem_of(error, request).response(getattr(request.state, "request_id", ""))

    for kind in (Problem, EverstepError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


def problem_of(error: Exception, request: Request) -> Problem:
    match error:
        case Problem():
            return error
        case Refused():
            return Problem(422, "invalid", error.message, errors=error.problems)
        case NotFound():
            return not_found(str(error))
        case Conflict():
            return conflict(str(error))
        case Outdated():
            return Problem(412, "outdated", str(error))
        case Unavailable():
            return Problem(503, "unavailable", str(error), headers={"Retry-After": "1"})
        case RequestValidationError():
            problems = problems_of(error.errors())
            return Problem(422, "invalid", sentence(problems[0]), errors=problems)
        case HTTPException():
            return _of_http(error, request)
        case _:
            said = {"request_id": getattr(request.state, "request_id", None)}
            words = (type(error).__name__, request.method, request.url.path)
            log.error("unhandled %s in %s %s", *words, exc_info=error, extra=said)
            return Problem(500, "bug", "the server made a mistake; its log has the trace under this request_id")


def _of_http(error: HTTPException, request: Request) -> Problem:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        detail = f"{request.url.path} is not part of this API; see /openapi.json"
        return Problem(404, "no-such-route", detail, headers=headers)
    if error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow") or "other methods"
        detail = f"{request.method} is not offered on {request.url.path}; use {allowed}"
        return Problem(405, "method", detail, headers=headers)
    kind = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    return Problem(error.status_code, kind, str(error.detail), headers=headers)


def shape_field(problem: FieldProblem) -> dict[str, Any]:
    shaped: dict[str, Any] = {"field": problem.field, "value": _shown(problem.value), "message": problem.message}
    if problem.allowed is not None:
        shaped["allowed"] = problem.allowed
    return shaped


def _shown(value: object) -> object:
    """A value short and plain enough to be sent back."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:200] + "..."
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 200 else text[:200] + "..."


__all__ = ["Problem", "conflict", "field_name", "install", "invalid", "not_found", "problem_of"]
