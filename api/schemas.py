"""What users may send: the job file and the small commands, with the range of every field.

Mirrors orchestrator.domain.spec field by field (a test compares them); defaults live there alone. Knows what is wrong with
a file by itself; whether the program, the data or the cluster agree is found out while the job is Probing.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from orchestrator.domain.checkpoint import LONGEST_JOURNAL
from orchestrator.domain.codec import decode
from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.kinds import KINDS, Kinds
from orchestrator.domain.queue import MAX_PRIORITY
from orchestrator.domain.size import Size
from orchestrator.domain.spec import (
    MAX_MICRO_BATCHES,
    Auto,
    Backend,
    CheckpointSpec,
    DataSpec,
    DeviceKind,
    Dtype,
    EvaluationSpec,
    Exact,
    JobSpec,
    ParallelSpec,
    Policy,
    RecoverySpec,
    TrainSpec,
    Verify,
)

from .documents import load_mapping
from .redaction import revealed
from .refusals import did_you_mean, refusal

Model = TypeVar("Model", bound="Request")


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def read(model: type[Model], mapping: dict[str, Any]) -> Model:
    """Raises Refused, naming every field at fault."""
    try:
        return model.model_validate(mapping)
    except ValidationError as error:
        raise refusal(error, model) from error


def load_job_file(text: str, content_type: str) -> JobSpec:
    """A job from JSON or YAML text. Raises Refused, naming every field at fault."""
    return read(JobFile, load_mapping(text, content_type)).to_spec()


# --- kinds of value ------------------------------------------------------------------------------------------------------


def _has_no_spaces_around(value: str) -> str:
    if value != value.strip() or not value.isprintable():
        raise ValueError("must be printable text without spaces around it")
    return value


Whole = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_has_no_spaces_around)]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        json_schema_extra={"allowed": "1..63 letters, digits, dots, dashes or underscores, the first a letter or digit"},
    ),
]
Labels = Annotated[dict[Name, Annotated[str, Field(max_length=255)]], Field(max_length=32)]
_ALLOWED_VARIABLES = "the name of an environment variable that is nobody else's"
_OTHERS_VARIABLES = re.compile(r"(EVERSTEP|RAY|FLAGS|LD|OMP|MKL|OPENBLAS|CUDA)_|PYTHON|(PATH|HOME|TMPDIR)$")


def _nobody_elses(variable: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", variable) or _OTHERS_VARIABLES.match(variable):
        raise ValueError(f"must be {_ALLOWED_VARIABLES}")
    return variable


Variable = Annotated[str, AfterValidator(_nobody_elses), Field(json_schema_extra={"allowed": _ALLOWED_VARIABLES})]
Secrets = Annotated[dict[Variable, Name], Field(max_length=32)]
Exactness = Annotated[Exact, Field(json_schema_extra={"allowed": "false, true or best_effort"})]
LabelWord = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        json_schema_extra={"allowed": "1..63 letters, digits, dots, dashes or underscores, a letter or digit at both ends"},
    ),
]


def _count_or_auto(value: object) -> object:
    if value != "auto" and not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9):
        raise ValueError("must be a whole number 0..1000000000 or auto")
    return value


Every = Annotated[
    int | Auto,
    BeforeValidator(_count_or_auto),
    Field(json_schema_extra={"allowed": "a whole number 0..1000000000 or auto"}),
]
Folder = Annotated[str, Field(pattern=r"^(/|$)", max_length=4096, json_schema_extra={"allowed": "an absolute path"})]
_ALLOWED_PLACES = "an absolute path, or a URL such as s3://bucket/runs"


def _place(value: str) -> str:
    """Objects in one process's memory are no place that anybody else sees."""
    scheme, found, rest = value.partition("://")
    is_folder = rest.startswith("/") and len(rest) > 1
    is_bucket = bool(re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme)) and scheme != "memory" and bool(re.match(r"[^/\s]", rest))
    fits = (is_folder if scheme in ("file", "local") else is_bucket) if found else value[:1] in ("", "/")
    if not fits:
        raise ValueError(f"must be {_ALLOWED_PLACES}")
    return value


Place = Annotated[str, AfterValidator(_place), Field(max_length=4096, json_schema_extra={"allowed": _ALLOWED_PLACES})]
Priority = Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Degree = Annotated[int, Field(strict=True, ge=1, le=65536)]


def _default(spec: type[Any], name: str) -> Any:
    """The default the domain gives a field: the only place where it is written."""
    field = next(field for field in dataclasses.fields(spec) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return Field(default=field.default)


# --- the job file --------------------------------------------------------------------------------------------------------


class DataSection(Request):
    files: Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]
    max_bytes: Annotated[Whole, Field(ge=1, le=1 << 50)] | None = _default(DataSpec, "max_bytes")
    text_field: Text = _default(DataSpec, "text_field")


class TrainSection(Request):
    steps: Annotated[Whole, Field(ge=1, le=10**9)]
    micro_batches: Annotated[Whole, Field(ge=1, le=MAX_MICRO_BATCHES)]
    micro_batch_size: Annotated[Whole, Field(ge=1, le=65536)]
    sequence: Annotated[Whole, Field(ge=1, le=1 << 20)]
    seed: Annotated[Whole, Field(ge=0, le=2**53 - 1)] = _default(TrainSpec, "seed")
    dtype: Dtype = _default(TrainSpec, "dtype")
    device: DeviceKind = _default(TrainSpec, "device")
    learning_rate: Annotated[Real, Field(ge=0, le=100)] = _default(TrainSpec, "learning_rate")
    min_learning_rate: Annotated[Real, Field(ge=0, le=100)] = _default(TrainSpec, "min_learning_rate")
    warmup_steps: Annotated[Whole, Field(ge=0, le=10**9)] = _default(TrainSpec, "warmup_steps")
    weight_decay: Annotated[Real, Field(ge=0, le=100)] = _default(TrainSpec, "weight_decay")
    beta1: Annotated[Real, Field(ge=0, lt=1)] = _default(TrainSpec, "beta1")
    beta2: Annotated[Real, Field(ge=0, lt=1)] = _default(TrainSpec, "beta2")
    epsilon: Annotated[Real, Field(gt=0, le=1)] = _default(TrainSpec, "epsilon")
    clip_norm: Annotated[Real, Field(gt=0, le=1e9)] = _default(TrainSpec, "clip_norm")
    activation_checkpointing: Annotated[bool, Field(strict=True)] = _default(TrainSpec, "activation_checkpointing")
    emulated_layer_s: Annotated[Real, Field(ge=0, le=60)] = _default(TrainSpec, "emulated_layer_s")
    exact: Exactness = _default(TrainSpec, "exact")


class EvaluationSection(Request):
    every: Annotated[Whole, Field(ge=0, le=10**9)] = _default(EvaluationSpec, "every")
    micro_batches: Annotated[Whole, Field(ge=1, le=1_000_000)] = _default(EvaluationSpec, "micro_batches")


class ParallelSection(Request):
    tp: Degree | None = _default(ParallelSpec, "tp")
    pp: Degree | None = _default(ParallelSpec, "pp")
    dp: Degree | None = _default(ParallelSpec, "dp")
    min_devices: Degree = _default(ParallelSpec, "min_devices")
    max_devices: Annotated[Whole, Field(ge=0, le=1_000_000)] = _default(ParallelSpec, "max_devices")


class CheckpointSection(Request):
    policy: Policy = _default(CheckpointSpec, "policy")
    every: Every = _default(CheckpointSpec, "every")
    keep_last: Annotated[Whole, Field(ge=1, le=1000)] = _default(CheckpointSpec, "keep_last")
    keep_every: Annotated[Whole, Field(ge=0, le=10**9)] = _default(CheckpointSpec, "keep_every")
    keep_best: Annotated[Whole, Field(ge=0, le=1000)] = _default(CheckpointSpec, "keep_best")
    path: Place = _default(CheckpointSpec, "path")
    local: Folder = _default(CheckpointSpec, "local")
    restore_from: Place = _default(CheckpointSpec, "restore_from")
    weights_only: Annotated[bool, Field(strict=True)] = _default(CheckpointSpec, "weights_only")


class RecoverySection(Request):
    mirrors: Annotated[Whole, Field(ge=0, le=1)] = _default(RecoverySpec, "mirrors")
    spares: Annotated[Whole, Field(ge=0, le=64)] = _default(RecoverySpec, "spares")
    compare_every: Annotated[Whole, Field(ge=0, le=10**9)] = _default(RecoverySpec, "compare_every")
    verify: Verify = _default(RecoverySpec, "verify")
    backend: Backend = _default(RecoverySpec, "backend")
    leave_s: Annotated[Real, Field(ge=0.05, le=60)] = _default(RecoverySpec, "leave_s")
    hang_s: Annotated[Real, Field(ge=0, le=86400)] = _default(RecoverySpec, "hang_s")
    copy_mb_s: Annotated[Real, Field(ge=0, le=1e6)] = _default(RecoverySpec, "copy_mb_s")
    max_isolation_s: Annotated[Real, Field(ge=0, le=604800)] = _default(RecoverySpec, "max_isolation_s")
    max_attempts: Annotated[Whole, Field(ge=1, le=1000)] = _default(RecoverySpec, "max_attempts")
    max_external_attempts: Annotated[Whole, Field(ge=1, le=10000)] = _default(RecoverySpec, "max_external_attempts")


class JobFile(Request):
    name: Name
    program: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$",
            max_length=255,
            json_schema_extra={"allowed": "a built-in program such as causal_lm, or module:attribute"},
        ),
    ]
    data: DataSection
    train: TrainSection
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    model: dict[str, JsonValue] = _default(JobSpec, "model")
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    labels: Labels = _default(JobSpec, "labels")
    priority: Priority = _default(JobSpec, "priority")
    project: Name = _default(JobSpec, "project")
    start_by_s: Annotated[Real, Field(ge=0, le=366 * 86400)] = _default(JobSpec, "start_by_s")
    max_runtime_s: Annotated[Real, Field(ge=0, le=366 * 86400)] = _default(JobSpec, "max_runtime_s")
    secrets: Secrets = _default(JobSpec, "secrets")

    def to_spec(self) -> JobSpec:
        """Raises Refused where fields that are each fine contradict each other."""
        problems = _contradictions(self)
        if problems:
            raise Refused(problems[0].message, problems)
        spec = decode(JobSpec, self.model_dump(mode="json"))
        assert isinstance(spec, JobSpec)
        return spec


def _contradictions(job: JobFile) -> tuple[FieldProblem, ...]:
    train, parallel = job.train, job.parallel
    pp, dp, ids = parallel.pp or 1, parallel.dp or 1, train.micro_batches
    found = []
    if place := revealed(job.model_dump(mode="json", exclude={"secrets"})):
        message = (
            f"{place} holds what looks like a secret, and a job is kept and shown as it was sent; "
            "keep the value with `everstep secret set NAME` and name it under secrets"
        )
        found.append(FieldProblem(field=place, value=None, message=message))
    if pp * dp > ids:
        stages = f"parallel.pp {pp}" + (f" x parallel.dp {dp}" if dp > 1 else "")
        message = (
            f"{stages} needs at least {pp * dp} micro-batches (one per stage of every pipeline), "
            f"train.micro_batches is {ids}; raise it or lower {'pp or dp' if dp > 1 else 'pp'}"
        )
        name, value = ("parallel.pp", pp) if pp > 1 else ("parallel.dp", dp)
        found.append(FieldProblem(field=name, value=value, message=message, allowed=f"pp x dp at most {ids}"))
    if job.recovery.verify == "recompute" and (parallel.dp == 1 or ids == 1):
        name, value = ("parallel.dp", parallel.dp) if parallel.dp == 1 else ("train.micro_batches", ids)
        message = (
            f"recovery.verify is recompute and {name} is {value}: there is no second pipeline to compute a micro-batch "
            "again; raise it to 2 or set recovery.verify to off"
        )
        found.append(FieldProblem(field="recovery.verify", value="recompute", message=message, allowed="off"))
    needs = {"nccl": "cuda", "gloo": "cpu"}.get(job.recovery.backend, train.device)
    if needs != train.device:
        message = (
            f"recovery.backend {job.recovery.backend} carries tensors of {needs} only and train.device is {train.device}; "
            f"set train.device to {needs} or recovery.backend to links"
        )
        found.append(FieldProblem(field="recovery.backend", value=job.recovery.backend, message=message, allowed="links"))
    # The default may exceed a short job: its learning rate is then still rising when it ends.
    if "warmup_steps" in train.model_fields_set and train.warmup_steps > train.steps:
        message = f"train.warmup_steps is {train.warmup_steps}, more than all {train.steps} steps; lower it"
        found.append(_too_high("train.warmup_steps", train.warmup_steps, message, train.steps))
    every = job.checkpoint.every
    if job.checkpoint.policy == "journal" and every != "auto" and not 2 <= every <= LONGEST_JOURNAL:
        said = (
            "no checkpoints are made then"
            if not every
            else "no step is left between two whole states"
            if every == 1
            else f"restoring would make up to {every - 1} steps again, {LONGEST_JOURNAL} is the limit"
        )
        message = (
            f"checkpoint.policy is journal and checkpoint.every is {every}: {said}; "
            f"set it to 2..{LONGEST_JOURNAL} or auto, or checkpoint.policy to full"
        )
        found.append(
            FieldProblem(field="checkpoint.every", value=every, message=message, allowed=f"2..{LONGEST_JOURNAL} or auto")
        )
    if job.checkpoint.weights_only and not job.checkpoint.restore_from:
        message = "checkpoint.weights_only is true and checkpoint.restore_from names no checkpoint; name one"
        found.append(FieldProblem(field="checkpoint.weights_only", value=True, message=message, allowed="false"))
    if train.min_learning_rate > train.learning_rate:
        message = (
            f"train.min_learning_rate {train.min_learning_rate:g} is above train.learning_rate {train.learning_rate:g}; "
            "the schedule decays from the second to the first"
        )
        found.append(_too_high("train.min_learning_rate", train.min_learning_rate, message, train.learning_rate))
    if parallel.tp and parallel.pp and parallel.dp and parallel.min_devices > parallel.tp * pp * dp:
        most = parallel.tp * pp * dp
        message = f"parallel.min_devices is {parallel.min_devices}, but tp x pp x dp uses only {most}; lower it"
        found.append(_too_high("parallel.min_devices", parallel.min_devices, message, most))
    least = max(parallel.min_devices, (parallel.tp or 1) * pp * dp)
    if 0 < parallel.max_devices < least:
        what = "min_devices" if least == parallel.min_devices else "tp x pp x dp"
        message = f"parallel.max_devices is {parallel.max_devices}, {what} needs {least}; raise it, or lower that"
        found.append(
            FieldProblem(
                field="parallel.max_devices", value=parallel.max_devices, message=message, allowed=f"at least {least}, or 0"
            )
        )
    return tuple(found)


def _too_high(field: str, value: float, message: str, most: float) -> FieldProblem:
    return FieldProblem(field=field, value=value, message=message, allowed=f"at most {most:g}")


# --- commands ------------------------------------------------------------------------------------------------------------


class AddNodeRequest(Request):
    kind: Annotated[str, Field(json_schema_extra={"allowed": f"{', '.join(KINDS)}, or one of the configuration"})]
    num_devices: Annotated[Whole, Field(ge=1, le=64)] = 2
    labels: Annotated[dict[LabelWord, LabelWord], Field(max_length=16)] = Field(default_factory=dict)
    """`rack` and `switch` name failure domains: mirrors keep out of their owner's."""
    count: Annotated[Whole, Field(ge=1, le=64)] = 1
    """Nodes of this kind."""

    def refuse_unless(self, kinds: Kinds) -> None:
        """Raises Refused for a kind that is not among these."""
        if self.kind not in kinds:
            allowed = ", ".join(kinds)
            said = f"kind is {self.kind!r}: must be one of {allowed}{did_you_mean(self.kind.upper(), kinds)}"
            raise Refused(said, (FieldProblem(field="kind", value=self.kind, message=said, allowed=allowed),))


class DrainRequest(Request):
    deadline_s: Annotated[float | None, Field(ge=0, le=30 * 86400)] = None
    """The node goes after so long in any case, as a spot instance does; only with remove."""
    remove: bool = False
    """Have the node taken away once it is empty."""


Devices = Annotated[Whole, Field(ge=0, le=1_000_000)]


class QuotaRequest(Request):
    max_devices: Devices | None
    """Of all of the project's jobs together; null for no limit. What they have already, they keep."""


class ResizeRequest(Request):
    """What is left out stays as it is; in devices, but for the priority."""

    min_devices: Annotated[Whole, Field(ge=1, le=1_000_000)] | None = None
    """The job waits rather than run on fewer."""
    max_devices: Devices | None = None
    """And never has more; 0 for no limit."""
    target: Devices | None = None
    """How many it should have now; 0 for as many as it can use."""
    priority: Priority | None = None
    """A job of a higher one comes first, and takes devices from running ones of a lower one."""

    @property
    def is_of_size(self) -> bool:
        return not self.min_devices is self.max_devices is self.target is None

    def require_some(self) -> None:
        """Raises Refused."""
        if not self.is_of_size and self.priority is None:
            raise Refused("nothing is to be changed; send min_devices, max_devices, target or priority")

    def changed(self, size: Size) -> Size:
        """Raises Refused where the three contradict each other."""
        self.require_some()
        wanted = self.model_dump(exclude={"priority"})
        now = replace(size, **{name: value for name, value in wanted.items() if value is not None})
        if now.max_devices and now.max_devices < now.min_devices:
            why = f"max_devices is {now.max_devices}, below min_devices {now.min_devices}; raise it or lower min_devices"
            raise Refused(why, (_too_high("min_devices", now.min_devices, why, now.max_devices),))
        if now.target and not now.min_devices <= now.target <= (now.max_devices or now.target):
            allowed = f"{now.min_devices} to {now.max_devices}" if now.max_devices else f"{now.min_devices} upwards"
            why = f"target is {now.target}, the job may have {allowed}; choose one of those or change the bounds"
            raise Refused(why, (FieldProblem(field="target", value=now.target, message=why, allowed=allowed),))
        return now
