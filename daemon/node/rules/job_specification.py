"""Checks a RunJob directive and turns it into the job specification that the rest of the node uses."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from bagua.base import code_archive
from bagua.base.protocol import MAX_PATIENCE_S
from bagua.proto import common_pb2, node_pb2

MAX_LOCAL_RANKS = 1024
MAX_HOSTS = 4096
NO_HOST = 0xFFFFFFFF  # as a host index
MAX_ENVIRONMENT_BYTES = 1 << 20
MAX_RUN_BYTES = 16 << 20
DEFAULT_GRACE_S = 5.0
DEFAULT_JOIN_S = 300.0
MAX_GRACE_S = 3600.0

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class SpecificationError(ValueError):
    """A directive that can't be carried out; the message says which field and why."""


@dataclass(frozen=True)
class Host:
    """Host of the job: its node, its ranks, ascending, and their member numbers."""

    node_id: str
    ranks: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(frozen=True)
class Code:
    """An archive of the job's code."""

    digest: str
    size: int


@dataclass(frozen=True)
class Program:
    """The program that every rank runs."""

    entry: str
    is_module: bool = False
    no_python: bool = False
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    secret_env: dict[str, str] = field(default_factory=dict)  # name -> path of a file on this node
    secrets: tuple[str, ...] = ()  # names of variables whose values the coordinator has
    workdir: str = ""
    python: str = ""
    code: Code | None = None  # ``workdir`` then lies below its root


@dataclass(frozen=True)
class Place:
    """The place of a process as it is told when it starts: the ranks of all hosts, which of them is its own, and which
    of the local processes it is."""

    hosts: tuple[tuple[int, ...], ...]
    host_index: int
    local_rank: int
    local_size: int

    @property
    def world_size(self) -> int:
        return sum(len(ranks) for ranks in self.hosts)


@dataclass(frozen=True)
class JobSpecification:
    """Generation of a job as this node sees it. Constant, but for the peers that become known later. ``elastic``:
    others may follow.

    ``host_index`` is -1 where this node is in no host of it: it has newcomers alone (``joining``: their members), or is
    to be left. ``planned``: ranks enter it after the same step everywhere; ``hold``: they wait there for another."""

    job_id: str
    generation: int
    host_index: int
    hosts: tuple[Host, ...]
    program: Program
    adopt: bool
    job_key: bytes
    master_addr: str
    master_port: int
    stop_grace_s: float
    join_timeout_s: float
    elastic: bool = False
    joining: tuple[int, ...] = ()
    planned: bool = False
    hold: bool = False
    waiting: str = ""  # why the job waits, in words
    patience_s: float = 0.0  # eight training steps of the job, where they take more than five seconds
    unix_user: str = ""  # of its ranks, where daemons run them as their submitter
    wire: bytes = b""  # the RunJob that it was made from

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks on this node, ascending."""
        return self.hosts[self.host_index].ranks if self.host_index >= 0 else ()

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the processes with these ranks: in the first generation the same."""
        return self.hosts[self.host_index].members if self.host_index >= 0 else ()

    @property
    def all_members(self) -> tuple[int, ...]:
        """Member numbers by rank."""
        return tuple(member for host in self.hosts for member in host.members)

    @property
    def world_size(self) -> int:
        return sum(len(host.ranks) for host in self.hosts)

    def place(self, member: int) -> Place:
        """Returns the place where a process of this node begins. Raises ValueError for one that is not of this node."""
        if member in self.joining:
            return Place(self.world_alone(), 0, self.joining.index(member), len(self.joining))
        sizes = tuple(host.ranks for host in self.hosts)
        return Place(sizes, self.host_index, self.members.index(member), len(self.members))

    def world_alone(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of hosts in a lobby: newcomers of this node see nobody else."""
        return (tuple(range(len(self.joining))),)


def is_safe_name(name: str) -> bool:
    """True if ``name`` may become a file name: letters, digits, ``.``, ``_``, ``-``; at most 128; no leading dot."""
    return _NAME.fullmatch(name) is not None


def clamp_grace(seconds: float) -> float:
    """Seconds between SIGTERM and SIGKILL, within [0, one hour]; not a number counts as 0."""
    return min(max(seconds, 0.0), MAX_GRACE_S) if seconds == seconds else 0.0  # not a number is unequal to itself


def unpack(run: node_pb2.RunJob) -> None:
    """Puts what is packed in its place. Raises SpecificationError."""
    if not run.packed:
        return
    try:
        unpacker = zlib.decompressobj()
        whole = unpacker.decompress(run.packed, MAX_RUN_BYTES)  # a few bytes may unpack to gigabytes
        if not unpacker.eof:
            raise SpecificationError(f"a packed directive is cut short, or has more than {MAX_RUN_BYTES} bytes [BG907]")
        run.ClearField("packed")
        run.MergeFromString(whole)
        first = 0
        for host in run.hosts:
            if host.nranks > MAX_LOCAL_RANKS:
                raise SpecificationError(f"{host.nranks} ranks on one node: {MAX_LOCAL_RANKS} are the most [BG907]")
            host.ranks.extend(range(first, first + host.nranks))
            first += host.nranks
            host.ClearField("nranks")
    except (zlib.error, DecodeError) as error:
        raise SpecificationError(f"a packed directive can't be read: {error} [BG907]") from error


def parse_specification(run: node_pb2.RunJob, node_id: str) -> JobSpecification:
    """Checks a RunJob for this node. Raises SpecificationError."""
    if not is_safe_name(run.job_id):
        raise SpecificationError(f"the job id {run.job_id[:200]!r} can't be used as a file name [BG907]")
    hosts = _parse_hosts(run)
    joining = joining_members(run, node_id)
    if {member for host in hosts for member in host.members} & set(joining) or len(set(joining)) < len(joining):
        raise SpecificationError(f"the numbers of newcomers, {list(joining)}, are not new [BG907]")
    if len(run.job_key) != 32:
        raise SpecificationError(f"the job key has {len(run.job_key)} bytes, not 32 [BG907]")
    if run.master_port > 65535:
        raise SpecificationError(f"MASTER_PORT {run.master_port} is not a port [BG907]")
    spec = run.spec
    grace = clamp_grace(spec.stop_grace_s)
    return JobSpecification(
        job_id=run.job_id,
        generation=run.generation,
        host_index=-1 if run.host_index == NO_HOST else run.host_index,
        hosts=hosts,
        program=_parse_program(spec),
        adopt=spec.adopt,
        job_key=run.job_key,
        master_addr=run.master_addr or "127.0.0.1",
        master_port=run.master_port,
        stop_grace_s=grace or DEFAULT_GRACE_S,  # 0: it was not given
        join_timeout_s=spec.join_timeout_s if spec.join_timeout_s > 0 else DEFAULT_JOIN_S,
        elastic=spec.elastic,
        joining=joining,
        planned=run.planned,
        hold=run.hold,
        waiting=run.waiting,
        patience_s=run.patience_s if 0 < run.patience_s <= MAX_PATIENCE_S else 0.0,
        unix_user=run.unix_user,
        wire=run.SerializeToString(),
    )


def joining_members(run: node_pb2.RunJob, node_id: str) -> tuple[int, ...]:
    """Numbers of the newcomers that this node is to start, in order."""
    return tuple(member for part in run.joining if part.node_id == node_id for member in part.members)


def parse_peers(run: node_pb2.RunJob) -> tuple[str, ...]:
    """Engine addresses of all hosts in ring order, or nothing while one of them is unknown or there is one host."""
    addresses = tuple(host.engine_address for host in run.hosts)
    return addresses if len(addresses) > 1 and all(addresses) else ()


def _parse_hosts(run: node_pb2.RunJob) -> tuple[Host, ...]:
    nowhere = run.host_index == NO_HOST and run.spec.elastic
    if not 0 < len(run.hosts) <= MAX_HOSTS or (run.host_index >= len(run.hosts) and not nowhere):
        raise SpecificationError(f"host index {run.host_index} of {len(run.hosts)} hosts makes no sense [BG907]")
    hosts = tuple(_parse_host(host) for host in run.hosts)
    ranks = sorted(rank for host in hosts for rank in host.ranks)
    if ranks != list(range(len(ranks))) or not all(host.ranks for host in hosts):
        raise SpecificationError("the ranks of the hosts are not 0, 1, … without gaps [BG907]")
    if not nowhere and len(hosts[run.host_index].ranks) > MAX_LOCAL_RANKS:
        raise SpecificationError(f"more than {MAX_LOCAL_RANKS} ranks on one node [BG907]")
    if len({member for host in hosts for member in host.members}) != len(ranks):
        raise SpecificationError("two ranks have one member number [BG907]")
    return hosts


def _parse_host(host: node_pb2.HostPlan) -> Host:
    members = host.members or host.ranks  # none in the first generation, where they are the same
    if len(members) != len(host.ranks):
        raise SpecificationError(
            f"{len(host.ranks)} ranks on node {host.node_id} have {len(members)} member numbers [BG907]"
        )
    pairs = sorted(zip(host.ranks, members, strict=True))
    return Host(host.node_id, tuple(rank for rank, _ in pairs), tuple(member for _, member in pairs))


def _parse_program(spec: common_pb2.JobSpec) -> Program:
    env = dict(spec.env)
    for key, value in [*env.items(), *spec.secret_env.items()]:
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise SpecificationError(f"the environment variable {key[:200]!r} can't be set [BG907]")
    if sum(len(key) + len(value) for key, value in env.items()) > MAX_ENVIRONMENT_BYTES:
        raise SpecificationError(f"the environment of the job has more than {MAX_ENVIRONMENT_BYTES} characters [BG907]")
    texts = [spec.entry, spec.workdir, spec.python, *spec.args]
    if any("\0" in text for text in texts):
        raise SpecificationError("a zero byte in the command line [BG907]")
    if not spec.entry and not spec.adopt:
        raise SpecificationError("the job names no script or program [BG907]")
    code = Code(spec.code.digest, spec.code.bytes) if spec.HasField("code") else None
    if code is not None:
        if why := code_archive.problem(code.digest, code.size):
            raise SpecificationError(f"the code of the job can't be right: {why} [BG907]")
        if spec.workdir and (why := code_archive.unsafe(spec.workdir)):
            raise SpecificationError(f"the working directory of the job is {why} [BG907]")
    return Program(
        code=code,
        entry=spec.entry,
        is_module=spec.is_module,
        no_python=spec.no_python,
        args=tuple(spec.args),
        env=env,
        secret_env=dict(spec.secret_env),
        secrets=tuple(spec.secrets),
        workdir=spec.workdir,
        python=spec.python,
    )
