"""The schema of 1.0. It stays as it is: a change of the models gets a migration of its own.

Coordinators make empty databases from the models, without Alembic. This one runs in databases with tables of others.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _jobs()
    _nodes_and_coordinators()
    _code()
    _tuning()
    _accounts()


def _job_id() -> sa.Column[str]:
    return sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("idempotency_key", sa.String(200), unique=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("brief", sa.LargeBinary, nullable=False, server_default=""),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("outcome", sa.Integer),
        sa.Column("cancel_reason", sa.Text),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("finished_at", sa.Float, nullable=False),
        sa.Column("submitted_clock", sa.Float, nullable=False),
        sa.Column("placed_clock", sa.Float, nullable=False),
        sa.Column("stopping_clock", sa.Float, nullable=False),
        sa.Column("stalls", sa.Integer, nullable=False, server_default="0"),
        sa.Column("plan", sa.Integer, nullable=False, server_default="0"),
        sa.Column("wanted_nodes", sa.Integer, nullable=False, server_default="0"),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("next_member", sa.Integer, nullable=False, server_default="0"),
        sa.Column("patience_s", sa.Float, nullable=False, server_default="0"),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("retry_clock", sa.Float, nullable=False, server_default="0"),
        sa.Column("respawns", sa.Text, nullable=False, server_default=""),
        sa.Column("master_addr", sa.String(255), nullable=False),
        sa.Column("master_port", sa.Integer, nullable=False),
        sa.Column("job_key", sa.LargeBinary, nullable=False),
        sa.Column("last_event", sa.Integer, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.String(64)),
        sa.Column("namespace", sa.String(64), nullable=False, server_default="default"),
        sa.Column("submitted_by", sa.String(200), nullable=False, server_default=""),
        sa.Column("unix_user", sa.String(200), nullable=False, server_default=""),
        sa.Index("ix_jobs_state_created_at", "state", "created_at"),
        sa.Index("ix_jobs_finished_at", "finished_at"),
        sa.Index("ix_jobs_created_at_job_id", "created_at", "job_id"),
        sa.Index("ix_jobs_namespace_created_at_job_id", "namespace", "created_at", "job_id"),
    )
    op.create_table(
        "job_specs",
        _job_id(),
        sa.Column("spec", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "job_hosts",
        _job_id(),
        sa.Column("host_index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("node_id", sa.String(200), nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("boot_id", sa.String(200), nullable=False),
        sa.Column("first_rank", sa.Integer, nullable=False),
        sa.Column("nranks", sa.Integer, nullable=False),
        sa.Column("phase", sa.Integer, nullable=False),
        sa.Column("engine_address", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("error_clock", sa.Float, nullable=False),
        sa.Column("waiting", sa.Text, nullable=False),
        sa.Column("suspended", sa.Text, nullable=False, server_default=""),
        sa.Column("suspended_clock", sa.Float, nullable=False, server_default="0"),
        sa.Column("lost_hosts", sa.Text, nullable=False, server_default=""),
        sa.Column("withdrawn", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("last_generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("entered", sa.Integer, nullable=False, server_default="0"),
        sa.Column("takes_newcomers", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("joining", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("dismissed", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("since_clock", sa.Float, nullable=False, server_default="0"),
        sa.Column("ranks", sa.Text, nullable=False),
        sa.Index("ix_job_hosts_node_id_phase", "node_id", "phase"),
    )
    op.create_table(
        "events",
        _job_id(),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
    )


def _nodes_and_coordinators() -> None:
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String(200), primary_key=True),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("boot_id", sa.String(200), nullable=False),
        sa.Column("last_seen", sa.Float, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("draining", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("leaving", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "coordinators",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("clock", sa.Float, nullable=False),
        sa.Column("address", sa.String(300), nullable=False, server_default=""),
        sa.Column("machine", sa.String(200), nullable=False, server_default=""),
        sa.Column("arrived_clock", sa.Float, nullable=False, server_default="0"),
    )


def _code() -> None:
    op.create_table(
        "code_archives",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("used_at", sa.Float, nullable=False),
    )
    op.create_table(
        "code_pieces",
        sa.Column("digest", sa.String(64), sa.ForeignKey("code_archives.digest", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "code_grants",
        sa.Column("digest", sa.String(64), sa.ForeignKey("code_archives.digest", ondelete="CASCADE"), primary_key=True),
        sa.Column("namespace", sa.String(64), primary_key=True),
    )
    op.create_table(
        "job_code",
        _job_id(),
        sa.Column("digest", sa.String(64), nullable=False, index=True),
    )


def _tuning() -> None:
    op.create_table(
        "tune_studies",
        sa.Column("study_id", sa.String(64), primary_key=True),
        sa.Column("study", sa.LargeBinary, nullable=False),
        sa.Column("settled", sa.Boolean, nullable=False),
        sa.Column("best", sa.Text, nullable=False),
        sa.Column("line", sa.Text, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False, index=True),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False, server_default="default"),
    )
    op.create_table(
        "tune_trials",
        sa.Column(
            "study_id", sa.String(64), sa.ForeignKey("tune_studies.study_id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("trial", sa.LargeBinary, nullable=False),
    )


def _accounts() -> None:
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float, nullable=False),
        sa.Column("unix_user", sa.String(200), nullable=False, server_default=""),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("method", sa.String(100), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("outcome", sa.String(40), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("peer", sa.String(200), nullable=False),
        sa.Index("ix_audit_time", "time"),
    )
