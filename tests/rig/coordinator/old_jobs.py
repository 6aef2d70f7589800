"""A coordinator's database with many jobs that have ended."""

import sqlite3
import time


def count_jobs(database):
    """Jobs in the database, read beside the coordinator."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30) as connection:
        return int(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])


def insert_old_jobs(database, spec, count, show):
    """Jobs of one rank that have succeeded within the last ten days, straight into the tables. ``show`` hears how many
    are written."""
    import sqlalchemy as sa

    from bagua.daemon.coordinator.rules.domain import JobState, Phase, RankState
    from bagua.daemon.coordinator.store import models as m

    wire = spec.SerializeToString(deterministic=True)
    now = time.time()
    steps = ("submitted", "placed", "rank_started", "state", "rank_exited", "node_stopped", "state", "state")
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        for start in range(0, count, 5_000):
            rows = {}
            for number in range(start, min(start + 5_000, count)):
                at = now - 864_000.0 * (1 - number / count)
                job = {"job_id": f"job-{number:010x}"}
                times = dict.fromkeys(("created_at", "started_at", "stopping_at", "finished_at"), at)
                rows.setdefault("jobs", []).append(
                    job
                    | times
                    | {"name": "bench", "spec": wire, "state": JobState.SUCCEEDED.value}
                    | {"reason": "1 rank ended with exit code 0", "outcome": JobState.SUCCEEDED.value, "generation": 1}
                    | {"master_addr": "127.0.0.1", "master_port": 20_000 + number % 12_000, "job_key": bytes(32)}
                    | {"last_event": len(steps), "revision": 9}
                )
                rows.setdefault("job_hosts", []).append(
                    job
                    | {"host_index": 0, "node_id": "node-0000", "hostname": "node-0000", "address": "127.0.0.1"}
                    | {"boot_id": "boot-of-node-0000", "nranks": 1, "phase": Phase.STOPPED.value}
                )
                path = f"/var/lib/bagua/node/jobs/{job['job_id']}/rank-0.log"
                rank = {"rank": 0, "node_id": "node-0000", "state": RankState.EXITED.value, "log_path": path}
                rows.setdefault("job_ranks", []).append(job | rank | {"exited_at": at, "seen_exited_at": at})
                members = [{"node_id": "node-0000", "first_rank": 0, "nranks": 1}]
                generation = {"number": 1, "members": members, "created_at": at, "reason": "placed on node-0000"}
                rows.setdefault("generations", []).append(job | generation)
                rows.setdefault("events", []).extend(
                    job | {"seq": seq, "time": at, "kind": kind, "reason": f"{kind}: rank 0 on node node-0000"}
                    for seq, kind in enumerate(steps, start=1)
                )
            for name, values in rows.items():
                table = m.metadata.tables.get(name)
                if table is not None:
                    connection.execute(sa.insert(table), [_whole(table, row) for row in values])
            show(start + 5_000)
    engine.dispose()


def _whole(table, row):
    """``row`` with the columns that ``table`` has, and something in each that must not be empty."""
    found = {}
    for column in table.columns:
        if column.name in row:
            found[column.name] = row[column.name]
        elif not column.nullable:
            found[column.name] = column.type.python_type()
    return found
