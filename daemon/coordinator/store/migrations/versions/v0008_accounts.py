"""Accounts, namespaces, and the audit log. What was there before belongs to the namespace "default"."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds tables and columns."""
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("token_id", name="pk_tokens"),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("method", sa.String(100), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("outcome", sa.String(40), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("peer", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
    )
    op.create_index("ix_audit_time", "audit", ["time"])
    op.create_table(
        "code_grants",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("digest", "namespace", name="pk_code_grants"),
        sa.ForeignKeyConstraint(["digest"], ["code_archives.digest"], name="fk_code_grants_digest", ondelete="CASCADE"),
    )
    op.execute("INSERT INTO code_grants (digest, namespace) SELECT digest, 'default' FROM code_archives")
    op.add_column("jobs", sa.Column("namespace", sa.String(64), nullable=False, server_default="default"))
    op.add_column("jobs", sa.Column("submitted_by", sa.String(200), nullable=False, server_default=""))
    op.create_index("ix_jobs_namespace_created_at_job_id", "jobs", ["namespace", "created_at", "job_id"])
    op.add_column("tune_studies", sa.Column("namespace", sa.String(64), nullable=False, server_default="default"))
