"""A BaguaJob as typed values. ``crd`` makes the schema of the CustomResourceDefinition from these classes, so what is
said here of fields, defaults and limits is what the API server checks. Most fields of ``spec.run`` are options of jobs:
``bagua.base.job_options`` has them."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, create_model
from pydantic.alias_generators import to_camel

from bagua.base import islands
from bagua.base.errors import ConfigError
from bagua.base.job_options import MAX_NODES, MAX_RANKS, OPTIONS, Option, variables
from bagua.operator import schemas

GROUP = "bagua.dev"
VERSION = "v1"
KIND = "BaguaJob"
PLURAL = "baguajobs"

AUTO = "auto"
CONTAINER = "daemon"
_GPU = re.compile(r"/(gpu|mig-)")  # nvidia.com/gpu, nvidia.com/gpu.shared, nvidia.com/mig-1g.10gb, amd.com/gpu
RanksOrAuto = Annotated[
    Annotated[int, Field(ge=1, le=MAX_RANKS)] | Literal["auto"],
    WithJsonSchema(
        {"x-kubernetes-int-or-string": True, "minimum": 1, "maximum": MAX_RANKS, "pattern": f"^{AUTO}$", "default": 1}
    ),
]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$")]
OtherName = Annotated[str, Field(pattern=r"^(|[a-z0-9]([-a-z0-9.]*[a-z0-9])?)$", max_length=253)]
SecretKey = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SecretName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]


def _checked(schema: schemas.Schema, where: str) -> Any:
    def check(value: Any) -> Any:
        if words := schemas.misfit(value, schema, where):
            raise ValueError(words)
        return value

    return BeforeValidator(check), WithJsonSchema(schema)


Resources = Annotated[dict[str, Any], *_checked(schemas.RESOURCES, "resources")]
Template = Annotated[dict[str, Any], *_checked(schemas.TEMPLATE, "template")]


class Model(BaseModel):
    """Fields are written in camel case in manifests."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, use_attribute_docstrings=True, extra="ignore"
    )


M = TypeVar("M", bound=type[Model])


def with_job_options(model: M) -> M:
    """Adds the options of jobs that manifests have."""
    fields: dict[str, Any] = {name: _field(one) for name, one in OPTIONS.items() if one.manifest}
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)  # type: ignore[return-value]


def _field(one: Option) -> Any:
    # A folder is a text in a manifest; an empty one stands for none.
    kind, default = (one.kind, one.default) if one.kind in (bool, int, float) else (str, one.default or "")
    pattern = f"^(|{'|'.join(one.choices)})$" if one.choices else r"^(|/.*)$" if one.kind is Path else None
    words = f"{one.metavar}: {one.words}" if one.metavar else one.words
    return kind, Field(default, description=words, ge=one.least, le=one.most, pattern=pattern)


class RestartPolicy(StrEnum):
    """Policy by which a failed job is submitted again."""

    NEVER = "Never"
    ON_FAILURE = "OnFailure"
    EXIT_CODE = "ExitCode"


class SuspendMode(StrEnum):
    """Way in which a suspended job waits."""

    RELEASE = "Release"
    PAUSE = "Pause"


class CleanPodPolicy(StrEnum):
    """Policy by which pods go when the job has ended."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class GangScheduler(StrEnum):
    """The program that sees to it that all of the minimum are placed, or none."""

    AUTO = "Auto"
    OPERATOR = "Operator"
    KUEUE = "Kueue"
    VOLCANO = "Volcano"


class Elastic(Model):
    """A lost pod ends the job no more; pods leave and join while it trains."""

    min_replicas: int = Field(default=1, ge=1, le=MAX_NODES)
    """The job waits when it has fewer pods."""
    max_replicas: int = Field(default=0, ge=0, le=MAX_NODES)
    """The most to which `kubectl scale` may go; 0: 4096."""
    respawn: int = Field(default=0, ge=0, le=1_000)
    """Lost ranks that are replaced on each pod, an hour."""


class KeyReference(Model):
    """A key of a Secret or a ConfigMap."""

    name: SecretName
    key: SecretKey
    optional: bool = False


class FieldReference(Model):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1)]
    api_version: str = "v1"


class ResourceReference(Model):
    """A limit or a request of a container; empty: the daemon's."""

    resource: Annotated[str, Field(min_length=1)]
    container_name: str = ""
    divisor: str = "0"


class ValueSource(Model):
    """One of them, as in a container of a pod."""

    secret_key_ref: KeyReference | None = None
    config_map_key_ref: KeyReference | None = None
    field_ref: FieldReference | None = None
    resource_field_ref: ResourceReference | None = None


class EnvVariable(Model):
    """A variable of the ranks."""

    name: EnvName
    value: str = ""
    value_from: ValueSource | None = None
    """Where each pod finds the value."""


class SecretVariable(Model):
    """A variable of the ranks whose value comes from a Secret, and is stored nowhere else."""

    name: EnvName
    secret_name: SecretName
    key: SecretKey


@with_job_options
class Run(Model):
    """The program of each rank: one of script, module and program."""

    script: str = ""
    """Path of a Python script in the image."""
    module: str = ""
    """Name of a Python module, as in python -m."""
    program: str = ""
    """Any other program."""
    args: list[str] = Field(default_factory=list)
    env: list[EnvVariable] = Field(default_factory=list)
    secret_env: list[SecretVariable] = Field(default_factory=list)
    workdir: Annotated[str, Field(pattern="^/")] = "/tmp"
    """Folder that ranks start in."""

    @property
    def entry(self) -> str:
        """The one of the three that is given."""
        return self.script or self.module or self.program

    @property
    def options(self) -> Any:
        """The options of jobs among the fields, and the variables whose values stand here."""
        given = {name: getattr(self, name) for name, one in OPTIONS.items() if one.manifest}
        return {**given, "env": {one.name: one.value for one in self.env if one.value_from is None}}


class SchedulingPolicy(Model):
    """Placement of pods: where and when."""

    gang_scheduler: GangScheduler = GangScheduler.AUTO
    """Auto: Kueue where a queue is named and Kueue is installed, else Volcano where it is installed, else Operator."""
    gang_timeout_seconds: int = Field(default=300, ge=10, le=86_400)
    """Operator alone: pods that are placed are given back when the minimum is not complete after so long."""
    queue: OtherName = ""
    """Queue of Kueue or Volcano."""
    priority_class: OtherName = ""
    """A PriorityClass of the cluster: pods of it may take the place of others."""
    workload_priority_class: OtherName = ""
    """A WorkloadPriorityClass of Kueue."""


class RunPolicy(Model):
    """Beginning and end of the job."""

    suspend: bool = False
    suspend_mode: SuspendMode = SuspendMode.RELEASE
    """Release: pods go, and the job is submitted again on resume, from its checkpoint if it keeps one. Pause: ranks of
    an elastic job wait after their step; pods, memory and devices stay."""
    restart_policy: RestartPolicy = RestartPolicy.ON_FAILURE
    """ExitCode: again after a death by signal or an exit code from 128, not after 1 to 127."""
    backoff_limit: int = Field(default=3, ge=0, le=1_000)
    """The most times that a failed job is submitted again."""
    backoff_seconds: int = Field(default=10, ge=0, le=3_600)
    """Pause before the first time, then twice as long, and so on up to an hour."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    """The job fails when it takes longer, pauses included."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    """The BaguaJob and all that belongs to it is deleted so long after the end."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.NONE
    """Pods that go at the end of the job. Daemons end then, and give devices back; the pods stay for `kubectl logs`.
    Running: those of which another container goes on. All: all of them."""
    stop_grace_seconds: int = Field(default=10, ge=0, le=3_600)
    """Between SIGTERM and SIGKILL of ranks."""
    drain_grace_seconds: int = Field(default=60, ge=0, le=86_400)
    """How long an evicted pod may take to leave an elastic job after a step."""
    scheduling_policy: SchedulingPolicy = Field(default_factory=SchedulingPolicy)


class Database(Model):
    """A PostgreSQL database that belongs to this job alone."""

    secret_name: SecretName
    key: SecretKey = "url"
    """Its value is a postgresql:// URL."""


class Coordinator(Model):
    """The coordinator of this job, which has its own."""

    image: str = ""
    """Empty: that of the job."""
    storage: Quantity = "1Gi"
    """Size of the volume with its state."""
    storage_class: OtherName = ""
    ephemeral: bool = False
    """No volume: when the coordinator's pod is lost, the job begins anew."""
    database: Database | None = None
    """PostgreSQL instead of a volume."""
    fence_after_seconds: int = Field(default=600, ge=0, le=86_400)
    """Ranks that no coordinator can reach end after so long; a new pod for it must come sooner. 0: never."""
    resources: Resources = Field(default_factory=dict)


class Spec(Model):
    """Specification of a BaguaJob."""

    image: Annotated[str, Field(min_length=1, pattern=r"^\S+$")]
    """Has bagua, torch and the program of the ranks."""
    image_pull_policy: Annotated[str, Field(pattern=r"^(|Always|IfNotPresent|Never)$")] = ""
    replicas: int = Field(default=1, ge=1, le=MAX_NODES)
    """Pods, with a node daemon each. Of an elastic job it may be changed while the job runs."""
    nproc_per_node: RanksOrAuto = 1
    """Ranks in each pod; auto: one for each GPU that the container asks for, without any one for each whole core."""
    elastic: Elastic | None = None
    run: Run
    resources: Resources = Field(default_factory=dict)
    """Resources of the daemon's container, ranks included."""
    shared_memory: Quantity = "8Gi"
    """Limit of /dev/shm, which counts as memory of the pod."""
    template: Template = Field(default_factory=dict)
    """A PodTemplate for what is not said here: volumes, node selectors, tolerations, sidecars. Its container named
    `daemon` is merged into that of the daemon."""
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    coordinator: Coordinator = Field(default_factory=Coordinator)

    @property
    def daemon(self) -> dict[str, Any]:
        """The container of the daemon, as far as the template says something of it."""
        found = self.template.get("spec", {}).get("containers", [])
        return next((one for one in found if one.get("name") == CONTAINER), {})

    @property
    def ranks(self) -> int:
        """Ranks in each pod. Raises ValueError for an amount that is no number."""
        if self.nproc_per_node != AUTO:
            return int(self.nproc_per_node)
        given = self.daemon.get("resources", self.resources)
        amounts = {**(given.get("requests") or {}), **(given.get("limits") or {})}
        gpus = sum(int(amount) for name, amount in amounts.items() if _GPU.search(name))
        cores = str(amounts.get("cpu", 1))
        return gpus or max(1, int(float(cores[:-1]) / 1000 if cores.endswith("m") else float(cores)))

    @property
    def minimum(self) -> int:
        """Pods without which nothing begins."""
        return self.elastic.min_replicas if self.elastic else self.replicas

    @property
    def maximum(self) -> int:
        """Largest number of pods."""
        return (self.elastic.max_replicas or MAX_NODES) if self.elastic else self.replicas

    @property
    def wanted(self) -> int:
        """Pods that should be there, within the limits."""
        return min(max(self.replicas, self.elastic.min_replicas), self.maximum) if self.elastic else self.replicas


def parse(spec: dict[str, Any]) -> Spec:
    """The specification of a manifest. Raises ConfigError, in words, for what the API server would refuse, and for
    rules that it checks by CEL from Kubernetes 1.25 on."""
    try:
        found = Spec.model_validate(spec)
    except ValidationError as error:
        first = error.errors()[0]
        words = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"spec.{'.'.join(str(part) for part in first['loc'])}: {words}. [BG830]") from error
    if sum(bool(one) for one in (found.run.script, found.run.module, found.run.program)) != 1:
        raise ConfigError("spec.run: give exactly one of script, module and program. [BG830]")
    try:
        env = variables(found.run.options)
    except ConfigError as error:
        raise ConfigError(f"spec.run: {error}") from error
    if found.elastic and found.elastic.max_replicas and found.elastic.max_replicas < found.elastic.min_replicas:
        raise ConfigError("spec.elastic: maxReplicas is less than minReplicas. [BG830]")
    if found.run_policy.suspend_mode is SuspendMode.PAUSE and found.elastic is None:
        raise ConfigError(
            "spec.runPolicy.suspendMode: only an elastic job can be paused. Give Release, or spec.elastic. [BG830]"
        )
    try:
        enough = found.ranks <= MAX_RANKS
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"spec.nprocPerNode: auto needs amounts of GPUs or cores in resources: {error}. [BG830]"
        ) from error
    if not enough:
        raise ConfigError(
            f"spec.nprocPerNode: auto gives {found.ranks} ranks, and a pod has at most {MAX_RANKS}. [BG830]"
        )
    try:  # before pods hold machines
        islands.check(
            islands.size_in(env),
            nodes=found.wanted,
            ranks=found.ranks,
            elastic=found.elastic is not None,
            respawn=found.elastic.respawn if found.elastic else 0,
        )
    except ConfigError as error:
        raise ConfigError(f"spec: {error}") from error
    return found


def check_replicas(spec: Spec) -> None:
    """Raises ConfigError for a number of pods beyond the limits of an elastic job, which Kubernetes checks by CEL."""
    if spec.replicas != spec.wanted:
        limits = f"elastic.minReplicas ({spec.minimum}) and elastic.maxReplicas ({spec.maximum})"
        raise ConfigError(f"spec.replicas: {spec.replicas} is not between {limits}. [BG830]")


def check_name(name: str) -> None:
    """Raises ConfigError for a name that labels and Services of the job can't have."""
    if words := schemas.misfit(name, schemas.NAME, "metadata.name"):
        raise ConfigError(f"{words}: small letters, digits and hyphens, and a letter first. [BG830]")
