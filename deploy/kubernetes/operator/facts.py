"""Facts that ``reconcile`` decides on, and the actions that it asks for. Values alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagua.operator.job import GROUP

Manifest = dict[str, Any]
JOB_LABEL = f"{GROUP}/job"
ROLE_LABEL = f"{GROUP}/role"
INDEX_LABEL = f"{GROUP}/index"
HASH = f"{GROUP}/hash"
ROTATE = f"{GROUP}/rotate"  # Annotation of a BaguaJob: with another value the token and the certificate are made anew
# Annotation of the coordinator's pod: which token and certificate it was started with.
CREDENTIALS = f"{GROUP}/credentials"


class NotOwnedError(Exception):
    """An object that a BaguaJob wants belongs to others; in words."""


@dataclass(frozen=True)
class Trouble:
    """Something that keeps a job from being made or placed, in one word and in the words of who refuses."""

    reason: str
    message: str


@dataclass(frozen=True)
class News:
    """An Event of Kubernetes."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Task:
    """The present attempt, as the coordinator tells it. ``state`` in the words of the command line. ``nodes``: those
    that hold a rank, a newcomer, or a rank that is on its way out. ``exit_code``: of the rank that failed first."""

    job_id: str
    state: str
    reason: str = ""
    nodes: frozenset[str] = frozenset()
    members: frozenset[str] = frozenset()
    wanted: int = 0
    paused: bool = False
    step: int = 0
    growth: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class NodeState:
    """A node daemon, as the coordinator tells it."""

    connected: bool
    draining: bool = False
    wire_version: int = 0


@dataclass(frozen=True)
class Pod:
    """A pod of a node daemon; its name is the node's id. ``notice``: why its machine will go away, in words."""

    name: str
    index: int
    phase: str = "Pending"
    scheduled: bool = False
    leaving: bool = False
    hash: str = ""
    notice: str = ""
    daemon_ended: bool = False  # other containers may run
    end: str = ""  # how it ended, in words
    trouble: Trouble | None = None  # of its scheduler, or of its kubelet

    @property
    def ended(self) -> bool:
        """True if the daemon has ended: this pod takes no job any more."""
        return self.daemon_ended or self.phase in ("Failed", "Succeeded")


@dataclass(frozen=True)
class Pods:
    """Pods of a job: of its daemons; whether its coordinator's is there, and what stands in its way. ``starting``: one
    that is placed and does not run yet, and since when."""

    daemons: tuple[Pod, ...]
    coordinator: bool
    trouble: Trouble | None
    starting: tuple[str, float] | None = None


@dataclass(frozen=True)
class Secrets:
    """Facts about the two Secrets of a job. ``rotation``: the job's annotation at their making. Times in seconds
    since the epoch."""

    token: bool = False
    certificate: bool = False
    rotation: str = ""
    made_at: float = 0.0
    expires_at: float = 0.0
    mark: str = ""  # Tells these values from others


@dataclass(frozen=True)
class Seen:
    """The result of a look at the cluster. ``hashes``: of objects that belong to the job, by kind and name. ``task`` is
    None if the coordinator has no job of this attempt; ``reachable``: it answered. ``former_attempts``: ids of other
    jobs that have not ended there."""

    body: Manifest
    pods: tuple[Pod, ...] = ()
    hashes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    coordinator_credentials: str = ""
    reachable: bool = False
    trouble: str = ""
    task: Task | None = None
    former_attempts: tuple[str, ...] = ()
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    api_groups: frozenset[str] = frozenset()
    valid_spec: Manifest | None = None  # the last one that could be used; None: that of the body
    invalid: str = ""  # why that of the body can't be used, where there was another one before
    refusal: Trouble | None = None  # of what the operator tried to make last
    waits: bool = False  # it is not tried again yet
    coordinator_trouble: Trouble | None = None  # of its pod
    ends: Mapping[str, str] = field(default_factory=dict)  # how pods ended that were seen and run no more, in words

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.body["metadata"]["namespace"])

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name of the BaguaJob."""
        return self.namespace, self.name

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def generation(self) -> str:
        """Another one with each change of the specification."""
        return str(self.body["metadata"].get("generation", ""))

    @property
    def spec(self) -> Manifest:
        """The specification that holds."""
        return dict(self.body["spec"] if self.valid_spec is None else self.valid_spec)

    @property
    def status(self) -> Manifest:
        return dict(self.body.get("status") or {})


@dataclass(frozen=True)
class MakeCredentials:
    """A new token, and, unless cert-manager does it, a new certificate. ``authority``: a new one, too."""

    token: bool
    certificate: bool


@dataclass(frozen=True)
class Apply:
    """Make the object so."""

    manifest: Manifest


@dataclass(frozen=True)
class Create:
    """Make the object if there is none of its name."""

    manifest: Manifest


@dataclass(frozen=True)
class Delete:
    """Delete an object; it is no error if there is none."""

    kind: str
    name: str
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class Submit:
    """Submit the attempt. Again with the same key it changes nothing."""

    key: str
    name: str


@dataclass(frozen=True)
class Cancel:
    """Request to end the attempt."""

    job_id: str
    reason: str


@dataclass(frozen=True)
class Scale:
    """Planned change: so many nodes."""

    job_id: str
    nodes: int


@dataclass(frozen=True)
class Pause:
    """Request that all ranks wait after their step."""

    job_id: str


@dataclass(frozen=True)
class Resume:
    """Request that paused ranks go on."""

    job_id: str


@dataclass(frozen=True)
class Gone:
    """Word to the coordinator that nothing runs on the node any more."""

    node_id: str
    why: str


@dataclass(frozen=True)
class Drain:
    """Request that nothing begins on the node, and that an elastic job leaves it."""

    node_id: str
    reason: str


@dataclass(frozen=True)
class End:
    """Request that the node's daemon ends with this code."""

    node_id: str
    exit_code: int


Action = MakeCredentials | Apply | Create | Delete | Submit | Cancel | Scale | Pause | Resume | Gone | Drain | End


@dataclass(frozen=True)
class Plan:
    """Actions in their order, the new status, and after how many seconds to look again (None: when something
    changes)."""

    actions: tuple[Action, ...]
    status: Manifest
    again_s: float | None
