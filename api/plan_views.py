"""A forecast as the API answers it."""

from __future__ import annotations

from orchestrator.domain.foresight import Forecast
from orchestrator.domain.plan import Infeasible

from .views import View


class PlanRowView(View):
    kind: str
    nodes: int
    first: str
    last: str
    devices: int
    used: int
    work: tuple[str, ...]
    memory_bytes: float
    memory_limit_bytes: float


class AlternativeView(View):
    shape: str
    step_s: float | None
    why: str


class ForecastView(View):
    """feasible false: only reason and forever say anything. Times are seconds; causes add up to step_s."""

    feasible: bool
    reason: str
    forever: bool = False
    shape: str = ""
    step_s: float | None = None
    causes: dict[str, float] = {}
    bound_s: float | None = None
    share_of_bound: float | None = None
    devices: int = 0
    idle: int = 0
    pipelines: int = 0
    micro_batches: tuple[int, ...] = ()
    rows: tuple[PlanRowView, ...] = ()
    alternatives: tuple[AlternativeView, ...] = ()
    survival: str = ""
    advice: tuple[str, ...] = ()


def forecast(found: Forecast | Infeasible) -> ForecastView:
    if isinstance(found, Infeasible):
        return ForecastView(feasible=False, reason=found.reason, forever=found.forever)
    return ForecastView(
        feasible=True,
        reason=found.reason,
        shape=found.shape,
        step_s=found.step_s,
        causes=dict(found.causes),
        bound_s=found.bound_s,
        share_of_bound=found.bound_s / found.step_s,
        devices=found.devices,
        idle=found.idle,
        pipelines=found.pipelines,
        micro_batches=found.ids,
        rows=tuple(
            PlanRowView(
                kind=row.kind,
                nodes=row.nodes,
                first=row.first,
                last=row.last,
                devices=row.devices,
                used=row.used,
                work=row.work,
                memory_bytes=row.memory_bytes,
                memory_limit_bytes=row.memory_limit_bytes,
            )
            for row in found.rows
        ),
        alternatives=tuple(AlternativeView(shape=one.shape, step_s=one.step_s, why=one.why) for one in found.alternatives),
        survival=found.survival,
        advice=found.advice,
    )
