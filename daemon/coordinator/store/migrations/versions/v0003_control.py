"""Deadlines by the service clock, leases by the beat of coordinators, ranks beside their host, an index to expire by.

Readings of the service clock begin anew: a job that waits gets its whole time again, once. Nothing here makes a table
anew, for that would take along the rows that refer to it.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_RANKS_AT_ONCE = 10_000


def upgrade() -> None:
    """Renames columns whose kind stays, adds the others, moves ranks to their hosts."""
    op.alter_column("jobs", "stopping_at", new_column_name="stopping_clock")
    op.alter_column("jobs", "lease_expires_at", new_column_name="placed_clock")
    op.add_column("jobs", sa.Column("submitted_clock", sa.Float, nullable=False, server_default="1"))
    op.execute("UPDATE jobs SET stopping_clock = 1, placed_clock = 1, lease_owner = NULL")
    op.execute("UPDATE nodes SET owner = NULL")  # whoever wrote this has no beat
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"])
    op.alter_column("job_hosts", "error_at", new_column_name="error_clock")
    op.add_column("job_hosts", sa.Column("ranks", sa.Text, nullable=False, server_default=""))
    op.execute("UPDATE job_hosts SET error_clock = 1 WHERE error <> ''")
    _move_ranks(op.get_bind())
    op.drop_table("job_ranks")
    op.drop_table("generations")
    op.create_table(
        "coordinators",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("clock", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_coordinators"),
    )


def _move_ranks(connection: sa.Connection) -> None:
    query = """SELECT h.job_id, h.host_index,
        r.state, r.pid, r.exit_code, r.signal, r.error_tail, r.log_path, r.exited_at
        FROM job_ranks r JOIN job_hosts h ON h.job_id = r.job_id
        AND r.rank >= h.first_rank AND r.rank < h.first_rank + h.nranks ORDER BY h.job_id, h.host_index, r.rank"""
    ranks: dict[tuple[str, int], list[list[object]]] = {}
    for row in connection.execute(sa.text(query)).all():
        ranks.setdefault((row[0], row[1]), []).append([*row[2:], 1.0])
    update = sa.text("UPDATE job_hosts SET ranks = :ranks WHERE job_id = :job_id AND host_index = :host_index")
    values = [
        {"job_id": job_id, "host_index": index, "ranks": json.dumps(found)} for (job_id, index), found in ranks.items()
    ]
    for start in range(0, len(values), _RANKS_AT_ONCE):
        connection.execute(update, values[start : start + _RANKS_AT_ONCE])
