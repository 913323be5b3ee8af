"""What a user asks for: one job's mathematics, its constraints on placement, and how it is kept safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["fp32", "bf16"]
Backend = Literal["links", "gloo", "nccl"]
DeviceKind = Literal["cpu", "cuda"]
Verify = Literal["off", "recompute"]
Exact = Literal[False, True, "best_effort"]
Policy = Literal["auto", "full", "journal"]
Auto = Literal["auto"]
type_json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Real text from files the user names."""

    files: tuple[str, ...]
    """Globs of .txt, .py, .md or .jsonl files; `{stdlib}` stands for the Python standard library's own sources."""
    max_bytes: int | None = None
    """Read at most this much text, in sorted file order."""
    text_field: str = "text"
    """The field of each .jsonl record that holds the text."""


MAX_MICRO_BATCHES = 4096
"""Of a step: the loss of each is kept on every rank's page, told with every step, and written with a job's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The mathematics. A step is micro_batches x micro_batch_size sequences of `sequence` tokens, whatever the plan."""

    steps: int
    micro_batches: int
    micro_batch_size: int
    sequence: int
    seed: int = 0
    dtype: Dtype = "fp32"
    """Of compute parameters and activations; masters and moments are always fp32."""
    device: DeviceKind = "cpu"
    """What ranks compute on. cuda: where a node has fewer of them than the job has ranks there, ranks share."""
    learning_rate: float = 3e-3
    min_learning_rate: float = 3e-4
    warmup_steps: int = 10
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    activation_checkpointing: bool = False
    emulated_layer_s: float = 0.0
    """On cpu, to try out a mixed cluster on one machine: seconds that a layer takes for one micro-batch, forward and
    backward, on an A100; a device's kind divides them. 0: no pretence."""
    exact: Exact = False
    """Sum gradients as integers, so that weights and losses have the same bits under every plan of one tp and one kind of
    device. True refuses plans that mix kinds; "best_effort" takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """The loss on text that is never trained on: the end of the job's text."""

    every: int = 0
    """Steps between evaluations, and after the last step; 0: none, and all of the text is trained on."""
    micro_batches: int = 8
    """How much text is held out, in micro-batches of the training's size; all of it is used each time."""

    def is_due(self, step: int, last: int) -> bool:
        """Whether the weights after this step are evaluated. last: the job's last step."""
        return bool(self.every) and step > 0 and (step % self.every == 0 or step == last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Constraints on the plan; None leaves the degree to the planner."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    min_devices: int = 1
    """The job waits rather than run on fewer,"""
    max_devices: int = 0
    """and takes no more than this; 0 for no limit. Both can be changed while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    policy: Policy = "full"
    """full: the whole state every so many steps. journal: between two whole states each step's gradient too, from which the
    step is made again. auto: what is expected to cost less, from what was measured."""
    every: int | Auto = 25
    """Steps from one whole state to the next; 0 turns checkpoints off. auto: what is expected to cost least."""
    keep_last: int = 2
    """The newest are kept,"""
    keep_every: int = 0
    """those of every so many steps (0: none),"""
    keep_best: int = 0
    """and so many of the lowest loss. Never removed: the newest, and the newest that a job was restored from and proved."""
    path: str = ""
    """Where they are kept: a folder that every node sees, or a URL (s3://bucket/runs); "": the server's own folder."""
    local: str = ""
    """A folder on each node's own disk for a second copy of what its devices save: restoring reads from there first."""
    restore_from: str = ""
    """Begin with this checkpoint, not the seed: its folder, or one whose newest is meant. The job goes on at its step."""
    weights_only: bool = False
    """Of restore_from: take weights alone and begin at step 0, with moments and a schedule of the job's own."""

    def folder_of(self, job: str, root: str) -> str:
        """Of this job's checkpoints. root: the folder that every node sees."""
        return f"{self.path.rstrip('/')}/{job}" if self.path else f"{root}/jobs/{job}/checkpoints"


NCCL_ABORT_S = 1.0
"""For which a rank may have to wait for nccl, which takes half a second to abort a communicator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpec:
    mirrors: int = 1
    """Second holders of every owned interval: 0 or 1."""
    spares: int = 0
    """Idle nodes on which hosts are kept warm, their ranks forked and built, to take a lost node's place."""
    compare_every: int = 10
    """Steps between comparisons of owners with mirrors; 0 leaves those before each checkpoint. None without mirrors."""
    verify: Verify = "off"
    """recompute: in each step one micro-batch is computed by a second pipeline too, and the gradients are compared."""
    backend: Backend = "links"
    leave_s: float = 0.5
    """A rank that has not left a closed generation after this long is killed; on nccl NCCL_ABORT_S later."""
    hang_s: float = 0.0
    """A rank that neither waits nor moves is given at least this long, in whatever it does, before it counts as hung; 0:
    seconds to minutes by kind of phase, more where its generation has shown more."""
    copy_mb_s: float = 0.0
    """How fast a newcomer is sent its state while training goes on, in MB/s a connection; 0: as fast as the link is."""
    max_isolation_s: float = 600.0
    """A host that hears from no supervisor for this long kills its ranks; 0 means never."""
    max_attempts: int = 8
    """Generations in a row that one cause of the job's own may end without a committed step before the job fails."""
    max_external_attempts: int = 64
    """The same for what is done to the job: signals, lost nodes, injected faults."""

    @property
    def killed_after_s(self) -> float:
        """After the close of a generation, who has not left it."""
        return self.leave_s + (NCCL_ABORT_S if self.backend == "nccl" else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: str
    program: str
    """A built-in program's name (`causal_lm`) or `module:attribute`."""
    data: DataSpec
    train: TrainSpec
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    model: type_json = field(default_factory=dict)
    """The program's own settings; it checks them itself while the job is Probing."""
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    labels: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    """Jobs of a higher one come first in the queue, and take devices from running ones of a lower one."""
    project: str = "default"
    """Whose quota its devices count against; tokens may be limited to projects."""
    start_by_s: float = 0.0
    """It fails where it has not begun to train so long after it was submitted; 0: it waits for ever."""
    max_runtime_s: float = 0.0
    """After so long on devices, in all, it is saved and ended, whatever step it is at; 0: never."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Environment variable -> name of a secret of the project: its processes find the value there, and nobody else does."""
