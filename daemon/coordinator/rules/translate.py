"""Translates between the protocol and ``domain``, and checks all input from outside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bagua.base import code_archive, islands
from bagua.base.errors import ConfigError, InvalidRequestError
from bagua.base.protocol import MAX_PATIENCE_S
from bagua.base.rpc import MAX_SPEC_BYTES, too_large_spec
from bagua.base.secrets import HIDDEN, looks_secret, shown
from bagua.daemon.coordinator.rules.domain import (
    Event,
    JobRecord,
    JobSpec,
    LocalJob,
    LocalRank,
    NodeRecord,
    NodeView,
    Phase,
    RankRecord,
    RankState,
)
from bagua.daemon.coordinator.rules.observe import SHORT_REASON
from bagua.proto import common_pb2, job_pb2, node_pb2

MAX_NAME = 200
MAX_PATH = 4_096
MAX_ARGS = 10_000
MAX_ENV = 2_000
MAX_TEXT = 512 << 10  # bytes of all arguments, and of the whole environment
MAX_RANKS = 100_000
MAX_SLOTS = 4_096
MAX_WAIT_S = 30 * 86_400.0
MAX_FACT = 16 << 10  # characters of one text of a fact
MAX_RESPAWN = 1_000
MAX_TAILS = 8 << 20  # characters of the last lines of all ranks in one answer
MAX_NUMBER = 2**63 - 1  # that databases take
MAX_WIRE_VERSION = 2**31 - 1


# ---- specs


def spec_from_wire(wire: bytes) -> JobSpec:
    """Reads a specification from its stored form."""
    return _summary(common_pb2.JobSpec.FromString(wire), wire)


def brief_of(wire: bytes) -> bytes:
    """The part of a stored spec that lists show."""
    spec = common_pb2.JobSpec.FromString(wire)
    return common_pb2.JobSpec(
        name=spec.name,
        entry=spec.entry,
        is_module=spec.is_module,
        no_python=spec.no_python,
        nnodes=spec.nnodes,
        nproc_per_node=spec.nproc_per_node,
    ).SerializeToString()


def checked_spec(spec: common_pb2.JobSpec) -> JobSpec:
    """A spec from outside. Raises InvalidRequestError that names the field."""
    _check_text("name", spec.name, MAX_NAME)
    _check_text("entry", spec.entry, MAX_PATH)
    if not spec.entry.strip():
        raise InvalidRequestError("spec.entry is empty: name a script, a module or a program. [BG812]")
    _check_text("workdir", spec.workdir, MAX_PATH)
    _check_folder(spec)
    _check_text("python", spec.python, MAX_PATH)
    _check_many("args", spec.args, MAX_ARGS)
    _check_many("env", [f"{key}={value}" for key, value in spec.env.items()], MAX_ENV)
    if spec.ByteSize() > MAX_SPEC_BYTES:
        raise InvalidRequestError(f"{too_large_spec(spec.ByteSize())} [BG812]")
    _check_variables(spec)
    _check_size(spec)
    _check_seconds("placement_timeout_s", spec.placement_timeout_s, MAX_WAIT_S)
    _check_seconds("stop_grace_s", spec.stop_grace_s, 3_600.0)
    _check_seconds("join_timeout_s", spec.join_timeout_s, MAX_WAIT_S)
    if spec.master_port > 65_535:
        raise InvalidRequestError(f"spec.master_port is {spec.master_port}: ports end at 65535. [BG812]")
    # The same job gives the same bytes: keys compare them.
    return _summary(spec, spec.SerializeToString(deterministic=True))


def _check_folder(spec: common_pb2.JobSpec) -> None:
    if spec.HasField("code"):
        if why := code_archive.problem(spec.code.digest, spec.code.bytes):
            raise InvalidRequestError(f"spec.code: {why}. [BG812]")
        if spec.workdir and (why := code_archive.unsafe(spec.workdir)):
            raise InvalidRequestError(
                f"spec.workdir is {spec.workdir!r}, {why}: with spec.code it lies in there. [BG812]"
            )
    elif spec.workdir and not spec.workdir.startswith("/"):
        raise InvalidRequestError(f"spec.workdir must be an absolute path, not {spec.workdir!r}. [BG812]")


def _check_variables(spec: common_pb2.JobSpec) -> None:
    _check_many("secret_env", [f"{key}={value}" for key, value in spec.secret_env.items()], MAX_ENV)
    for field, names in (("env", spec.env), ("secret_env", spec.secret_env)):
        for name in names:
            if not name or "=" in name:
                raise InvalidRequestError(
                    f"spec.{field}: {name[:MAX_NAME]!r} can't be the name of an environment variable. [BG812]"
                )
    for name, path in spec.secret_env.items():
        if name in spec.env:
            raise InvalidRequestError(f"spec.secret_env: {name[:MAX_NAME]!r} is in spec.env, too. [BG812]")
        if name in spec.secrets:
            raise InvalidRequestError(f"secrets: {name[:MAX_NAME]!r} is in spec.secret_env, too. [BG812]")
        if not path.startswith("/") or len(path) > MAX_PATH:
            raise InvalidRequestError(
                f"spec.secret_env: {name[:MAX_NAME]!r} needs the absolute path of a file. [BG812]"
            )
    for name in spec.secrets:
        if name in spec.env:
            raise InvalidRequestError(f"secrets: {name[:MAX_NAME]!r} is in spec.env, too. [BG812]")
    for name, value in spec.env.items():
        if value == HIDDEN and looks_secret(name):  # a spec that came out of an answer
            raise InvalidRequestError(
                f"spec.env: the value of {name[:MAX_NAME]!r} is '{HIDDEN}', which stands for one that is not shown. "
                "[BG812]"
            )


def _summary(spec: common_pb2.JobSpec, wire: bytes) -> JobSpec:
    return JobSpec(
        name=spec.name,
        nnodes=spec.nnodes,
        nproc_per_node=spec.nproc_per_node,
        placement_timeout_s=spec.placement_timeout_s,
        stop_grace_s=spec.stop_grace_s,
        master_port=spec.master_port,
        wire=wire,
        elastic=spec.elastic,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        respawn=spec.respawn,
        island_size=islands.size_in(spec.env),
        code=spec.code.digest,
    )


def _check_size(spec: common_pb2.JobSpec) -> None:
    if spec.nnodes < 1:
        raise InvalidRequestError("spec.nnodes must be at least 1. [BG812]")
    if spec.nproc_per_node < 1:
        raise InvalidRequestError("spec.nproc_per_node must be at least 1. [BG812]")
    if spec.nnodes * spec.nproc_per_node > MAX_RANKS:
        raise InvalidRequestError(
            f"spec.nnodes x spec.nproc_per_node is {spec.nnodes} x {spec.nproc_per_node}: "
            f"a job can have {MAX_RANKS} ranks at most. [BG812]"
        )
    _check_islands(spec)
    _check_elastic(spec)


def _check_islands(spec: common_pb2.JobSpec) -> None:
    try:
        islands.check(
            islands.size_in(spec.env),
            nodes=spec.nnodes,
            ranks=spec.nproc_per_node,
            elastic=spec.elastic,
            respawn=spec.respawn,
        )
    except ConfigError as error:
        raise InvalidRequestError(f"spec: {error}") from None
    if islands.VARIABLE in spec.secret_env:
        raise InvalidRequestError(f"spec.secret_env: {islands.VARIABLE} is no secret: give it in spec.env. [BG114]")


def _check_elastic(spec: common_pb2.JobSpec) -> None:
    if not spec.elastic:
        if spec.min_nodes or spec.max_nodes or spec.respawn:
            raise InvalidRequestError("spec.min_nodes, spec.max_nodes and spec.respawn need spec.elastic. [BG812]")
        return
    if spec.adopt:
        raise InvalidRequestError(
            "spec.elastic and spec.adopt exclude each other: whoever started the ranks ends all when one is lost. "
            "[BG812]"
        )
    if spec.respawn > MAX_RESPAWN:
        raise InvalidRequestError(f"spec.respawn is {spec.respawn}: {MAX_RESPAWN} an hour is the most. [BG812]")
    least, most = spec.min_nodes or 1, spec.max_nodes or spec.nnodes
    if least > most:
        raise InvalidRequestError(
            f"spec.min_nodes is {least}, more than the {most} nodes that the job may have. [BG812]"
        )
    if not least <= spec.nnodes <= most:
        raise InvalidRequestError(f"spec.nnodes is {spec.nnodes}: it must be from {least} to {most}. [BG812]")


def _check_text(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequestError(f"spec.{field} has {len(text)} characters; {limit} is the limit. [BG812]")
    if "\0" in text:
        raise InvalidRequestError(f"spec.{field} contains a NUL character. [BG812]")


def _check_many(field: str, texts: Sequence[str], limit: int) -> None:
    if len(texts) > limit:
        raise InvalidRequestError(f"spec.{field} has {len(texts)} entries; {limit} is the limit. [BG812]")
    total = sum(len(text.encode()) for text in texts)
    if total > MAX_TEXT:
        raise InvalidRequestError(f"spec.{field} has {total} bytes; {MAX_TEXT} is the limit. [BG812]")
    if any("\0" in text for text in texts):
        raise InvalidRequestError(f"spec.{field} contains a NUL character. [BG812]")


def _check_seconds(field: str, value: float, limit: float) -> None:
    if not math.isfinite(value) or not 0 <= value <= limit:
        raise InvalidRequestError(f"spec.{field} is {value}: give seconds from 0 to {limit:g}. [BG812]")


# ---- facts


def checked_hello(hello: node_pb2.Hello) -> NodeRecord:
    """A node's introduction. Raises InvalidRequestError."""
    for field in ("node_id", "hostname", "address", "version", "boot_id"):
        text = getattr(hello, field)
        if len(text) > MAX_NAME or "\0" in text:
            raise InvalidRequestError(f"hello.{field} has {len(text)} characters; {MAX_NAME} is the limit. [BG820]")
        if not text and field in ("node_id", "address", "boot_id"):
            raise InvalidRequestError(f"hello.{field} is empty. [BG820]")
    if not 0 <= hello.slots <= MAX_SLOTS:
        raise InvalidRequestError(f"hello.slots is {hello.slots}; {MAX_SLOTS} is the limit. [BG820]")
    return NodeRecord(
        node_id=hello.node_id,
        hostname=hello.hostname,
        address=hello.address,
        slots=hello.slots,
        version=hello.version[:64],
        boot_id=hello.boot_id,
        last_seen=0.0,
        leaving=hello.status.draining,
        wire_version=min(hello.wire_version, MAX_WIRE_VERSION),
    )


def local_job(fact: node_pb2.LocalJob) -> LocalJob:
    """A node's report on a job. Raises InvalidRequestError."""
    if not fact.job_id or len(fact.job_id) > 64 or len(fact.ranks) > MAX_SLOTS:
        raise InvalidRequestError(f"job {fact.job_id[:64]!r}: the id or the number of ranks can't be right. [BG820]")
    try:
        return LocalJob(
            job_id=fact.job_id,
            generation=fact.generation,
            phase=Phase(fact.phase),
            engine_address=_clean(fact.engine_address),
            error=_clean(fact.error),
            waiting=_clean(fact.waiting),
            suspended=_clean(fact.suspended),
            suspended_hosts=tuple(fact.suspended_hosts[:MAX_SLOTS]),
            suspended_nodes=tuple(_clean(name)[:MAX_NAME] for name in fact.suspended_nodes[:MAX_SLOTS]),
            accused=tuple(_clean(name)[:MAX_NAME] for name in fact.accused_nodes[:MAX_SLOTS]),
            passes=fact.passes & MAX_NUMBER,  # databases have signed numbers
            takes_newcomers=fact.takes_newcomers,
            entered=fact.entered & MAX_NUMBER,
            withdrawn=fact.withdrawn,
            patience_s=min(fact.patience_s, MAX_PATIENCE_S) if fact.patience_s > 0 else 0.0,
            ranks=tuple(_local_rank(rank) for rank in fact.ranks),
        )
    except ValueError as error:  # a number that is not in an enumeration
        raise InvalidRequestError(f"job {fact.job_id!r}: {error} [BG820]") from error


def _local_rank(rank: common_pb2.RankStatus) -> LocalRank:
    return LocalRank(
        rank=rank.rank,
        state=RankState(rank.state or RankState.WAITING),
        pid=rank.pid & 0x7FFFFFFF,
        exit_code=rank.exit_code,
        signal=rank.signal,
        error_tail=_clean(rank.error_tail),
        log_path=_clean(rank.log_path),
        # It is compared and stored: NaN fits neither.
        exited_at=rank.exited_at if math.isfinite(rank.exited_at) else 0.0,
        follows=rank.follows,
        member=rank.member,
        left=rank.left,
        newcomer=rank.newcomer,
        ready_to_join=rank.ready_to_join,
        reason=_clean(rank.reason),
    )


def _clean(text: str) -> str:
    """Databases take no NUL, answers no texts without end. Of a long one the end says most: it is kept."""
    return text[-MAX_FACT:].replace("\0", "\N{REPLACEMENT CHARACTER}")


def checked_number(field: str, value: int) -> int:
    """A number that a query may hold. Raises InvalidRequestError."""
    if not 0 <= value <= MAX_NUMBER:
        raise InvalidRequestError(f"{field} is {value}: {MAX_NUMBER} is the limit. [BG820]")
    return value


# ---- answers


def job_message(
    job: JobRecord, progress: common_pb2.Progress | None = None, growth: str = "", *, with_ranks: bool = True
) -> job_pb2.Job:
    """A job as users see it. ``growth``: why nobody joins it."""
    message = job_pb2.Job(
        job_id=job.job_id,
        spec=_shown_spec(job.spec.wire),
        state=common_pb2.JobState.ValueType(job.state),
        reason=job.reason,
        generation=job.generation,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        namespace=job.namespace,
        submitted_by=job.submitted_by,
        unix_user=job.unix_user,
        progress=progress,
        waiting=job.waiting,
    )
    message.gone.extend(_gone_messages(job))
    message.joining.extend(rank_message(rank) for part in job.joining for rank in part.ranks)
    if job.spec.elastic:
        message.wanted_nodes, message.paused, message.growth = job.wanted, job.paused, growth
    if with_ranks:
        message.ranks.extend(_rank_messages(job.ranks))
    return message


def summary_message(row: Mapping[Any, Any]) -> job_pb2.Job:
    """A job as lists show it. ``row``: columns of ``jobs``, with ``brief`` for the spec."""
    shown = {name: value for name, value in row.items() if name != "brief"}
    return job_pb2.Job(spec=common_pb2.JobSpec.FromString(row["brief"]), **shown)


def _rank_messages(ranks: Iterable[RankRecord]) -> list[common_pb2.RankStatus]:
    """Makes the messages about ranks. Only those that ended first have their last lines: if thousands failed, all lines
    fit into no answer.
    """
    found = [rank_message(rank) for rank in ranks]
    room = MAX_TAILS
    for rank in sorted((rank for rank in found if rank.error_tail), key=lambda rank: rank.exited_at):
        room -= len(rank.error_tail)
        if room < 0:
            rank.ClearField("error_tail")
            rank.reason = rank.reason[:SHORT_REASON]
    return found


def _gone_messages(job: JobRecord) -> list[common_pb2.RankStatus]:
    found = []
    for host in job.former:
        for rank in host.ranks:
            found.append(rank_message(rank))
            found[-1].last_generation = host.last_generation
    return sorted(found, key=lambda rank: rank.member)


def _shown_spec(wire: bytes) -> common_pb2.JobSpec:
    """The stored spec without the values of secrets."""
    spec = common_pb2.JobSpec.FromString(wire)
    for name, value in shown(spec.env).items():
        spec.env[name] = value
    return spec


def rank_message(rank: RankRecord) -> common_pb2.RankStatus:
    return common_pb2.RankStatus(
        rank=rank.rank,
        local_rank=rank.local_rank,
        node_id=rank.node_id,
        state=common_pb2.RankState.ValueType(rank.state),
        pid=rank.pid,
        exit_code=rank.exit_code,
        signal=rank.signal,
        error_tail=rank.error_tail,
        log_path=rank.log_path,
        exited_at=rank.exited_at,
        follows=rank.follows,
        member=rank.number,
        newcomer=rank.newcomer,
        ready_to_join=rank.ready,
        reason=rank.reason,
    )


def event_message(event: Event) -> job_pb2.JobEvent:
    return job_pb2.JobEvent(**vars(event))


def node_message(view: NodeView) -> job_pb2.Node:
    return job_pb2.Node(
        node_id=view.node_id,
        hostname=view.hostname,
        address=view.address,
        slots=view.slots,
        used_slots=view.used,
        connected=view.connected,
        last_seen=view.last_seen,
        version=view.version,
        draining=view.draining,
        wire_version=view.wire_version,
    )


def checked_progress(progress: common_pb2.Progress) -> common_pb2.Progress:
    """A report of a rank. Raises InvalidRequestError if it is too large to be kept."""
    if len(progress.job_id) > 64 or len(progress.metrics) > 100 or len(progress.message) > 2_000:
        raise InvalidRequestError("progress: 100 metrics and 2000 characters at most. [BG820]")
    if any(len(name) > MAX_NAME for name in progress.metrics):
        raise InvalidRequestError(f"progress: the name of a metric can have {MAX_NAME} characters at most. [BG820]")
    return progress
