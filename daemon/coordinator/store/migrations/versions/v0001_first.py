"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes all tables."""
    _jobs()
    _members()
    op.create_table(
        "generations",
        _job_id(),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("members", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_generations"),
        _to_jobs("generations"),
    )
    op.create_table(
        "events",
        _job_id(),
        sa.Column("seq", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_events"),
        _to_jobs("events"),
    )
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String(200), nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("boot_id", sa.String(200), nullable=False),
        sa.Column("last_seen", sa.Float, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.PrimaryKeyConstraint("node_id", name="pk_nodes"),
    )


def _job_id() -> sa.Column[str]:
    return sa.Column("job_id", sa.String(64), nullable=False)


def _to_jobs(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=f"fk_{table}_job_id", ondelete="CASCADE")


def _jobs() -> None:
    op.create_table(
        "jobs",
        _job_id(),
        sa.Column("idempotency_key", sa.String(200)),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("outcome", sa.Integer),
        sa.Column("cancel_reason", sa.Text),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("stopping_at", sa.Float, nullable=False),
        sa.Column("finished_at", sa.Float, nullable=False),
        sa.Column("master_addr", sa.String(255), nullable=False),
        sa.Column("master_port", sa.Integer, nullable=False),
        sa.Column("job_key", sa.LargeBinary, nullable=False),
        sa.Column("last_event", sa.Integer, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.String(64)),
        sa.Column("lease_expires_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )
    op.create_index("ix_jobs_state_created_at", "jobs", ["state", "created_at"])


def _members() -> None:
    op.create_table(
        "job_hosts",
        _job_id(),
        sa.Column("host_index", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("node_id", sa.String(200), nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("boot_id", sa.String(200), nullable=False),
        sa.Column("first_rank", sa.Integer, nullable=False),
        sa.Column("nranks", sa.Integer, nullable=False),
        sa.Column("phase", sa.Integer, nullable=False),
        sa.Column("engine_address", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("error_at", sa.Float, nullable=False),
        sa.Column("waiting", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "host_index", name="pk_job_hosts"),
        _to_jobs("job_hosts"),
    )
    op.create_index("ix_job_hosts_node_id_phase", "job_hosts", ["node_id", "phase"])
    op.create_table(
        "job_ranks",
        _job_id(),
        sa.Column("rank", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("local_rank", sa.Integer, nullable=False),
        sa.Column("node_id", sa.String(200), nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("exit_code", sa.Integer, nullable=False),
        sa.Column("signal", sa.Integer, nullable=False),
        sa.Column("error_tail", sa.Text, nullable=False),
        sa.Column("log_path", sa.Text, nullable=False),
        sa.Column("exited_at", sa.Float, nullable=False),
        sa.Column("seen_exited_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "rank", name="pk_job_ranks"),
        _to_jobs("job_ranks"),
    )
