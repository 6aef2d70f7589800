"""Specifications in a table of their own, so that nothing but a look at one job reads them; lists have an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from bagua.daemon.coordinator.rules.translate import brief_of

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_AT_ONCE = 100


def upgrade() -> None:
    """Moves specifications, and writes what lists show of them. Nothing here makes ``jobs`` anew: that would take along
    the rows that refer to it."""
    specs = op.create_table(
        "job_specs",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_specs"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_job_specs_job_id", ondelete="CASCADE"),
    )
    op.add_column("jobs", sa.Column("brief", sa.LargeBinary, nullable=False, server_default=""))
    jobs = sa.table("jobs", sa.column("job_id"), sa.column("spec"), sa.column("brief"))
    db = op.get_bind()
    last = ""
    while True:
        query = sa.select(jobs.c.job_id, jobs.c.spec).where(jobs.c.job_id > last).order_by(jobs.c.job_id)
        rows = db.execute(query.limit(_AT_ONCE)).all()
        if not rows:
            break
        last = rows[-1].job_id
        db.execute(sa.insert(specs), [{"job_id": row.job_id, "spec": row.spec} for row in rows])
        statement = sa.update(jobs).where(jobs.c.job_id == sa.bindparam("key")).values(brief=sa.bindparam("made"))
        db.execute(statement, [{"key": row.job_id, "made": brief_of(row.spec)} for row in rows])
    op.drop_column("jobs", "spec")
    op.create_index("ix_jobs_created_at_job_id", "jobs", ["created_at", "job_id"])
