"""What one deployment of the service is told: one model, whatever it is read from. Its defaults are those of `everstep up`.

Every process of the service reads all of it and uses its own part. Where values come from is config_sources.py's business;
what jobs ask for is schemas.py's.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from orchestrator.domain.kinds import DeviceKind
from orchestrator.notify.addresses import Reach
from orchestrator.notify.retrying import Patience

from .kind_rows import KindSection, rows
from .schemas import Name
from .settings import ApiSettings

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


def _without_spaces(value: str) -> str:
    if value != value.strip() or any(char.isspace() for char in value):
        raise ValueError("must have no spaces")
    return value


def _as_network(value: str) -> str:
    try:
        return str(ip_network(value))
    except ValueError:
        raise ValueError("must be a network, such as 10.1.2.0/24 or fd00::/8") from None


NetworkName = Annotated[str, Field(max_length=60), AfterValidator(_as_network)]
HostName = Annotated[str, Field(max_length=253), AfterValidator(_without_spaces)]
_DEFAULTS = ApiSettings(state_dir=Path())


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ApiSection(Section):
    """The REST API and the dashboard."""

    host: HostName = "127.0.0.1"
    """The address it listens on."""
    port: Port = 0
    """0: any that is free."""
    chaos: bool = _DEFAULTS.chaos
    """Whether users may cause faults on purpose."""
    auth: Literal["required", "off"] = "required"
    """off: nobody is asked who they are. Only where others cannot reach it."""
    allowed_hosts: Annotated[tuple[HostName, ...], Field(min_length=1, max_length=100)] = _DEFAULTS.allowed_hosts
    """Names that may stand in a request's Host and Origin headers, with any port."""
    max_body_bytes: Count = _DEFAULTS.max_body_bytes
    """Of a request."""
    max_log_bytes: Count = _DEFAULTS.max_log_bytes
    """Of one answer of /logs."""
    requests_per_s: Annotated[float, Field(gt=0, le=1e6)] = _DEFAULTS.requests_per_s
    """Of one token, in the long run,"""
    burst: Annotated[float, Field(ge=1, le=1e7)] = _DEFAULTS.burst
    """and at once."""
    max_open_requests: Count = _DEFAULTS.max_open_requests
    """Of one token at a time, event streams included."""
    max_metric_jobs: Annotated[int, Field(ge=0, le=10_000)] = _DEFAULTS.max_metric_jobs
    """Newest open jobs that get series of their own in /metrics."""
    ping_s: Seconds = _DEFAULTS.ping_s
    """An event stream with nothing to say sends a comment this often."""
    health_timeout_s: Seconds = _DEFAULTS.health_timeout_s
    """For all checks of /readyz together."""
    grace_s: Annotated[int, Field(ge=0, le=60)] = 2
    """Between the signal to stop and cutting the streams that are still open: readers come back with their last id."""


class RedisSection(Section):
    """Where the state is. Without a host: a private redis-server under the state directory, started by `everstep up`."""

    host: HostName = ""
    """Of a Redis that is run apart; it must have appendonly yes and appendfsync always."""
    port: Annotated[int, Field(ge=1, le=65535)] = 6379
    password: SecretStr | None = None
    """Better in a file."""
    password_file: Path | None = None
    """Whose first line is the password."""

    @model_validator(mode="after")
    def _has_one_password(self) -> RedisSection:
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file are both given; leave one out")
        return self


class RaySection(Section):
    """Which Ray cluster hosts run on. Without an address: the emulated nodes of this machine."""

    address: HostName = ""
    """host:port of the GCS of a cluster that is run apart."""
    token_file: Path | None = None
    """Holds that cluster's token; whoever has it owns the cluster."""


class SupervisorSection(Section):
    holder: Annotated[str, Field(max_length=200)] = ""
    """Its name on the lease. Empty: host name and state directory; two on one directory need two names."""
    metrics_host: HostName = "127.0.0.1"
    metrics_port: Port | None = 0
    """For Prometheus. 0: any that is free, written to run/prometheus.json under the state directory; null: none."""
    keep_days: Annotated[float, Field(ge=0, le=36500)] = 7
    """A finished job's history, steps and logs; then its record alone is left, short,"""
    keep_jobs: Annotated[int, Field(ge=0, le=1_000_000)] = 10_000
    """as of all but so many of the newest finished ones,"""
    archive_days: Annotated[float, Field(ge=0, le=36500)] = 365
    """until this long after the job's end. Checkpoints stay."""


class LocalSection(Section):
    """What `everstep up` starts on this machine."""

    nodes: Annotated[str, Field(max_length=10_000)] = "A100:2,A100:2,H100:2,B200:2"
    """KIND:DEVICES[@RACK] of each emulated node."""
    address: HostName = "127.0.0.1"
    """Where Ray's head listens, for nodes on other machines."""


class JobsSection(Section):
    """Processes of jobs, on every machine whose nodes are started from here. `everstep join` takes the variables."""

    user: Literal["own", "service"] = "own"
    """own: where the service runs as root, each job runs as an unprivileged user that no other job there is. service: as
    whoever the service runs as."""
    user_ids: Annotated[str, Field(pattern=r"^[1-9]\d{0,8}-[1-9]\d{0,8}$")] = "60578-61183"
    """The numbers those users have, first and last. Nobody has to create them; nobody else may have them."""
    max_open_files: Annotated[int, Field(ge=0, le=1 << 30)] = 65536
    """Of one process; 0: as many as the service may."""
    max_processes: Annotated[int, Field(ge=0, le=1 << 22)] = 16384
    """Threads included, of one job on one machine, where it has a user of its own; 0: as many as the service may."""
    max_memory_gib: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Of one process, for its own data; 0: as much as there is."""

    @model_validator(mode="after")
    def _has_numbers(self) -> JobsSection:
        first, last = map(int, self.user_ids.split("-"))
        if first > last:
            raise ValueError(f"user_ids {self.user_ids} must begin with the lower number")
        return self


class WebhooksSection(Section):
    """Telling others over HTTP what happens."""

    enabled: bool = True
    http: bool = False
    """Whether a webhook's URL may be without TLS. Messages are signed, and anybody on their way can read them."""
    networks: Annotated[tuple[NetworkName, ...], Field(max_length=100)] = ()
    """Networks that may be told though their addresses are private, loopback or otherwise not public: 10.1.2.0/24."""
    timeout_s: Annotated[float, Field(gt=0, le=120)] = 10.0
    """Of one message, name resolution included."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 8
    """Of one message, before it is given up."""
    first_wait_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Before the second attempt; each wait is four times as long as the one before, up to an hour."""
    max_failures: Annotated[int, Field(ge=1, le=1000)] = 10
    """Messages given up in a row, after which a webhook is paused."""


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"
    """json: one object a line, for machines."""


class Config(Section):
    """Configuration of the Everstep service."""

    state_dir: Path = Path("~/.everstep")
    """Jobs' logs and checkpoints, and everything that `everstep up` starts."""
    api: ApiSection = ApiSection()
    redis: RedisSection = RedisSection()
    ray: RaySection = RaySection()
    supervisor: SupervisorSection = SupervisorSection()
    local: LocalSection = LocalSection()
    jobs: JobsSection = JobsSection()
    kinds: Annotated[dict[Name, KindSection], Field(max_length=64)] = Field(default_factory=dict)
    """Kinds of device besides those that everybody knows, or other figures for these, by name."""
    webhooks: WebhooksSection = WebhooksSection()
    log: LogSection = LogSection()

    @property
    def root(self) -> Path:
        """state_dir, absolute."""
        return self.state_dir.expanduser().resolve()

    def api_settings(self, version: str) -> ApiSettings:
        own = {name: getattr(self.api, name) for name in type(self.api).model_fields if name in ApiSettings.__slots__}
        return ApiSettings(state_dir=self.root, version=version, kinds=self.rows, **own)

    @property
    def webhook_reach(self) -> Reach:
        return Reach(http=self.webhooks.http, networks=tuple(ip_network(one) for one in self.webhooks.networks))

    @property
    def webhook_patience(self) -> Patience:
        asked = self.webhooks
        return Patience(attempts=asked.attempts, first_wait_s=asked.first_wait_s, max_failures=asked.max_failures)

    @property
    def rows(self) -> tuple[DeviceKind, ...]:
        """Of kinds of device."""
        return rows(self.kinds, "the configuration")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def schema() -> dict[str, Any]:
    """JSON Schema of a configuration file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
