"""Which role each route needs: one table, and the one dependency that every route of the API passes.

A route that is not in the table needs an admin, so that a forgotten one is closed, not open; a test says which is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from orchestrator.domain.access import Principal, Role

from .problems import Problem


@dataclass(frozen=True, slots=True)
class Need:
    """everywhere: what it tells or changes is no project's alone, so a token that is limited to projects can't."""

    role: Role
    everywhere: bool = False


READ, ACT, OWN = Need(Role.VIEWER), Need(Role.OPERATOR), Need(Role.ADMIN, everywhere=True)
ADMIN = Need(Role.ADMIN)
READ_ALL, ACT_ALL = Need(Role.VIEWER, everywhere=True), Need(Role.OPERATOR, everywhere=True)

NEEDS: Mapping[str, Need] = {
    # jobs
    "submit": ACT,
    "list_jobs": READ,
    "get_job": READ,
    "list_plans": READ,
    "cancel": ACT,
    "pause": ACT,
    "resume": ACT,
    "resize": ACT,
    "cancel_many": ACT,
    "pause_many": ACT,
    "resume_many": ACT,
    "resize_many": ACT,
    "submit_as": ACT,
    "list_checkpoints": READ,
    "checkpoint_now": ACT,
    "events": READ,
    "metrics": READ,
    "logs": READ,
    "log_lines": READ,
    "list_faults": READ,
    "plan": ACT,  # imports the program that the body names,
    "validate": ACT,  # and so does this
    "live": READ,
    "get_queue": READ,
    "list_projects": READ,
    "get_project": READ,
    # the cluster
    "set_quota": OWN,
    "list_nodes": READ,
    "add_node": ACT_ALL,
    "cordon": ACT_ALL,
    "uncordon": ACT_ALL,
    "drain": ACT_ALL,
    "remove_node": ACT_ALL,
    "release_node": ACT_ALL,
    "cause_fault": Need(Role.CHAOS, everywhere=True),
    # the service
    "version": READ,
    "config_schema": READ,
    "job_schema": READ,
    "prometheus": READ_ALL,
    # access
    "whoami": READ,
    "sign_out": READ,
    "make_login_code": READ,
    "create_token": OWN,
    "list_tokens": OWN,
    "revoke_token": OWN,
    "audit_log": OWN,
    # webhooks: of its own projects, where a token is limited to some
    "create_webhook": ADMIN,
    "list_webhooks": ADMIN,
    "get_webhook": ADMIN,
    "delete_webhook": ADMIN,
    "pause_webhook": ADMIN,
    "resume_webhook": ADMIN,
    "test_webhook": ADMIN,
    "list_deliveries": ADMIN,
    "redeliver": ADMIN,
}
OPEN = frozenset({"healthz", "readyz", "sign_in"})
"""Routes that ask nobody who they are."""


def get_principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


async def authorize(request: Request) -> None:
    """Raises Problem (403). Who asks is known by now: the doorman has seen to it."""
    name = request.scope["route"].name
    if name in OPEN:
        return
    need, principal = NEEDS.get(name, OWN), get_principal(request)
    if not principal.may(need.role):
        roles = " and ".join(principal.roles) or "none"
        raise Problem(403, "forbidden", f"this needs the role {need.role}, this token has {roles}; use another token")
    if need.everywhere and principal.projects:
        projects = ", ".join(principal.projects)
        detail = f"this is about the whole cluster, this token is limited to {projects}; use a token for all projects"
        raise Problem(403, "forbidden", detail)


ThePrincipal = Annotated[Principal, Depends(get_principal)]
