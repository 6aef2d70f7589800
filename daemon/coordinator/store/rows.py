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
    JobState,
    Phase,
    Plan,
    RankRecord,
    RankState,
)
from bagua.daemon.coordinator.rules.translate import brief_of, spec_from_wire
from bagua.daemon.coordinator.store import models as m


def event_row(job_id: str, seq: int, event: Event) -> dict[str, Any]:
    return {**vars(event), "job_id": job_id, "seq": seq}


def new_job_row(job: JobRecord, idempotency_key: str | None, owner: str, last_event: int) -> dict[str, Any]:
    return {
        **{name: _plain(getattr(job, name)) for name in _JOB_FIELDS},
        "idempotency_key": idempotency_key,
        "name": job.spec.name,
        "brief": brief_of(job.spec.wire),
        "last_event": last_event,
        "revision": 1,
        "lease_owner": owner,
    }


def changed_job(change: Change) -> dict[str, Any]:
    """Makes the parameters of ``UPDATE_JOB``."""
    return {
        **{name: _plain(getattr(change.job, name)) for name in _CHANGING},
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


_JOB_FIELDS = tuple(field.name for field in fields(JobRecord) if field.name in m.jobs.c)
_ONCE = ("job_id", "created_at", "submitted_clock", "job_key", "namespace", "submitted_by", "unix_user")
_CHANGING = tuple(name for name in _JOB_FIELDS if name not in _ONCE)
_HOST_FIELDS = tuple(field.name for field in fields(HostRecord) if field.name not in ("index", "ranks"))
_RANK_FIELDS = tuple(field.name for field in fields(RankRecord) if field.name not in ("rank", "local_rank", "node_id"))


def host_row(job_id: str, host: HostRecord) -> dict[str, Any]:
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


def job_record(row: Mapping[Any, Any], hosts: tuple[HostRecord, ...]) -> JobRecord:
    """Reads a row of ``jobs`` with its specification."""
    values = {name: row[name] for name in _JOB_FIELDS}
    values["state"], values["plan"] = JobState(row["state"]), Plan(row["plan"])
    values["outcome"] = None if row["outcome"] is None else JobState(row["outcome"])
    for name in ("respawns", "accusations", "put_out"):
        values[name] = tuple(tuple(one) for one in json.loads(row[name] or "[]"))
    return JobRecord(
        spec=spec_from_wire(row["spec"]),
        **values,
        hosts=tuple(host for host in hosts if host.index >= 0),
        # Rows come in the order of their indices: the newest first.
        former=tuple(reversed([host for host in hosts if host.index < 0 and not host.joining])),
        joining=tuple(reversed([host for host in hosts if host.joining])),
    )


def host_record(row: Mapping[Any, Any]) -> HostRecord:
    values = {name: row[name] for name in _HOST_FIELDS}
    values["phase"] = Phase(values["phase"])
    for name in ("lost_hosts", "accused"):
        values[name] = tuple(json.loads(values[name] or "[]"))
    return HostRecord(index=row["host_index"], **values, ranks=_ranks(row))


# ---- statements that are run often: made once

UPDATE_JOB = (
    sa.update(m.jobs)
    .where(m.jobs.c.job_id == sa.bindparam("p_job_id"))
    .values({name: sa.bindparam(name) for name in (*_CHANGING, "lease_owner", "last_event", "revision")})
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
