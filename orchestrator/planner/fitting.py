"""Whether a rectangular plan fits memory: stage by stage, on the devices it has, by the rules that mixed plans obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device
from orchestrator.domain.kinds import DeviceKind, row_of

from .ask import gib
from .job import model_of, rules_of
from .memory import Rules, live, need, usable
from .model import Model


@dataclass(frozen=True, slots=True)
class Fitting:
    """Of one job: its model, and what state it keeps."""

    model: Model
    rules: Rules
    samples: int
    micro_batches: int
    kinds: dict[Device, DeviceKind]
    is_one_kind: bool

    @classmethod
    def of(cls, request: ChoosePlan) -> Fitting:
        train = request.spec.train
        rows = {name: row_of(name, request.table) for name in {kind for _, kind in request.devices}}
        return cls(
            model=model_of(request.spec, request.profile),
            rules=replace(rules_of(request.spec), recompute=train.activation_checkpointing),
            samples=train.micro_batch_size,
            micro_batches=train.micro_batches,
            kinds={device: rows[kind] for device, kind in request.devices},
            is_one_kind=len(rows) == 1,
        )

    def lacking(self, bounds: Sequence[int], groups: Sequence[tuple[Device, ...]]) -> str:
        """What is too much for which device, or nothing. groups: stage 0 of every pipeline, then stage 1 of every one."""
        depth = len(bounds) - 1
        replicas, tp = len(groups) // depth, len(groups[0])
        ids = -(-self.micro_batches // replicas)
        for stage in range(depth):
            kind = self._smallest(groups[stage * replicas : (stage + 1) * replicas])
            found = need(
                self.model.layers[bounds[stage] : bounds[stage + 1]],
                self.model,
                kind,
                self.rules,
                tp=tp,
                samples=self.samples,
                in_flight=live(ids, depth, stage),
                replicas=replicas,
            )
            if found.total > usable(kind):
                where = f" (layers {bounds[stage]}-{bounds[stage + 1] - 1})" if depth > 1 else ""
                return f"{gib(found.total)} on a {kind.name}{where}, {gib(usable(kind))} are usable"
        return ""

    def _smallest(self, groups: Sequence[tuple[Device, ...]]) -> DeviceKind:
        if self.is_one_kind:
            return self.kinds[groups[0][0]]
        return min((self.kinds[device] for group in groups for device in group), key=usable)
