"""Rows of jobs, their hosts and events: how records of ``domain`` become them, and back."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from bagua.daemon.coordinator.rules.domain import (
    Change,
    Event,
    HostRecord,
    JobRecord,
    JobSpec,
    JobState,
    Phase,
    Plan,
    RankRecord,
    RankState,
)
from bagua.daemon.coordinator.rules.translate import brief_of, spec_from_wire
from bagua.daemon.coordinator.store import models as m


def event_row(job_id: str, seq: int, event: Event) -> dict[str, Any]:
    """Makes a row of ``events``."""
    return {
        "job_id": job_id,
        "seq": seq,
        "time": event.time,
        "kind": event.kind,
        "reason": event.reason,
        "generation": event.generation,
    }


def new_job_row(job: JobRecord, idempotency_key: str | None, owner: str, last_event: int) -> dict[str, Any]:
    """Makes a row of ``jobs``."""
    return {
        **job_row(job),
        "job_id": job.job_id,
        "idempotency_key": idempotency_key,
        "name": job.spec.name,
        "brief": brief_of(job.spec.wire),
        "created_at": job.created_at,
        "submitted_clock": job.submitted_clock,
        "job_key": job.job_key,
        **{name: getattr(job, name) for name in _ORIGIN},
        "last_event": last_event,
        "revision": 1,
        "lease_owner": owner,
    }


def changed_job(change: Change) -> dict[str, Any]:
    """Makes the parameters of ``UPDATE_JOB``."""
    return {
        **job_row(change.job),
        "p_job_id": change.job.job_id,
        "lease_owner": change.owner,
        "last_event": change.stored.last_event,
        "revision": change.stored.revision,
    }


def changed_hosts(change: Change) -> list[dict[str, Any]]:
    """Parameters of ``UPDATE_HOST``, of the hosts that differ."""
    pairs = zip(change.job.parts, change.old.job.parts, strict=True)
    rows = [host_row(change.job.job_id, host) for host, before in pairs if host is not before and host != before]
    for row in rows:
        row["p_job_id"], row["p_host_index"] = row.pop("job_id"), row.pop("host_index")
    return rows


def _plain(value: Any) -> Any:
    """Every database driver takes it."""
    if isinstance(value, tuple):
        return json.dumps(value) if value else ""
    return int(value) if isinstance(value, enum.IntEnum) else value


# Columns of JobRecord that need no word about how.
_JOB_FIELDS = (
    "stalls",
    "wanted_nodes",
    "paused",
    "next_member",
    "patience_s",
    "failures",
    "retry_clock",
    "respawns",
    "plan",
)
_ORIGIN = ("namespace", "submitted_by", "unix_user")  # written once
_HOST_FIELDS = tuple(field.name for field in fields(HostRecord) if field.name not in ("index", "ranks"))


_RANK_FIELDS = tuple(field.name for field in fields(RankRecord) if field.name not in ("rank", "local_rank", "node_id"))


def host_row(job_id: str, host: HostRecord) -> dict[str, Any]:
    """Makes a row of ``job_hosts``."""
    row = {name: _plain(getattr(host, name)) for name in _HOST_FIELDS}
    return {**row, "job_id": job_id, "host_index": host.index, "ranks": _ranks_text(host.ranks)}


def _ranks_text(ranks: Sequence[RankRecord]) -> str:
    if all(rank == RankRecord(rank.rank, rank.local_rank, rank.node_id) for rank in ranks):
        return ""
    return json.dumps([[getattr(rank, name) for name in _RANK_FIELDS] for rank in ranks], separators=(",", ":"))


def _ranks(host: Mapping[Any, Any]) -> tuple[RankRecord, ...]:
    first, node_id = host["first_rank"], host["node_id"]
    if not host["ranks"]:
        return tuple(RankRecord(first + local, local, node_id) for local in range(host["nranks"]))
    return tuple(  # rows of the first versions have no member
        RankRecord(first + local, local, node_id, RankState(state), *rest)
        for local, (state, *rest) in enumerate(json.loads(host["ranks"]))
    )


def job_row(job: JobRecord) -> dict[str, Any]:
    """Columns that change during the life of a job."""
    return {
        "state": _plain(job.state),
        "reason": job.reason,
        "outcome": _plain(job.outcome),
        "cancel_reason": job.cancel_reason,
        "generation": job.generation,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "placed_clock": job.placed_clock,
        "stopping_clock": job.stopping_clock,
        **{name: _plain(getattr(job, name)) for name in _JOB_FIELDS},
        "master_addr": job.master_addr,
        "master_port": job.master_port,
    }


def job_record(row: Mapping[Any, Any], hosts: tuple[HostRecord, ...]) -> JobRecord:
    """Reads a row of ``jobs`` with its specification."""
    spec: JobSpec = spec_from_wire(row["spec"])
    return JobRecord(
        job_id=row["job_id"],
        spec=spec,
        created_at=row["created_at"],
        state=JobState(row["state"]),
        reason=row["reason"],
        outcome=None if row["outcome"] is None else JobState(row["outcome"]),
        cancel_reason=row["cancel_reason"],
        generation=row["generation"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        submitted_clock=row["submitted_clock"],
        placed_clock=row["placed_clock"],
        stopping_clock=row["stopping_clock"],
        **{name: row[name] for name in _JOB_FIELDS if name not in ("plan", "respawns")},
        plan=Plan(row["plan"]),
        respawns=tuple((node_id, at) for node_id, at in json.loads(row["respawns"] or "[]")),
        master_addr=row["master_addr"],
        master_port=row["master_port"],
        job_key=row["job_key"],
        **{name: row[name] for name in _ORIGIN},
        hosts=tuple(host for host in hosts if host.index >= 0),
        former=tuple(reversed([host for host in hosts if host.index < 0 and not host.joining])),
        joining=tuple(reversed([host for host in hosts if host.joining])),
    )


def host_record(row: Mapping[Any, Any]) -> HostRecord:
    """Reads a row of ``job_hosts``."""
    values = {name: row[name] for name in _HOST_FIELDS}
    values["phase"] = Phase(values["phase"])
    values["lost_hosts"] = tuple(json.loads(values["lost_hosts"] or "[]"))
    return HostRecord(index=row["host_index"], **values, ranks=_ranks(row))


# ---- statements that are run often: made once

UPDATE_JOB = (
    sa.update(m.jobs)
    .where(m.jobs.c.job_id == sa.bindparam("p_job_id"))
    .values(
        {
            name: sa.bindparam(name)
            for name in (
                *job_row(JobRecord("", JobSpec("", 0, 0, 0.0, 0.0, 0, b""), 0.0)),
                "lease_owner",
                "last_event",
                "revision",
            )
        }
    )
)
UPDATE_HOST = (
    sa.update(m.job_hosts)
    .where(m.job_hosts.c.job_id == sa.bindparam("p_job_id"), m.job_hosts.c.host_index == sa.bindparam("p_host_index"))
    .values({name: sa.bindparam(name) for name in (*_HOST_FIELDS, "ranks")})
)
INSERT_HOST = sa.insert(m.job_hosts)
DELETE_HOSTS = sa.delete(m.job_hosts).where(m.job_hosts.c.job_id == sa.bindparam("p_job_id"))
INSERT_EVENT = sa.insert(m.events)
INSERT_SPEC = sa.insert(m.job_specs)
