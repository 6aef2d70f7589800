"""Archives of code that jobs run in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds tables."""
    op.create_table(
        "code_archives",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("used_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_code_archives"),
    )
    op.create_table(
        "code_pieces",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("digest", "number", name="pk_code_pieces"),
        sa.ForeignKeyConstraint(["digest"], ["code_archives.digest"], name="fk_code_pieces_digest", ondelete="CASCADE"),
    )
    op.create_table(
        "job_code",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_code"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_job_code_job_id", ondelete="CASCADE"),
    )
    op.create_index("ix_job_code_digest", "job_code", ["digest"])
