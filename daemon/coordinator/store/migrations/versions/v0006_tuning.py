"""Trials of jobs that tune themselves.

Tables of our own, and not those of Optuna: its schema has an alembic_version of its own, and would need a second
migration at each of its releases.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds tables."""
    op.create_table(
        "tune_studies",
        sa.Column("study_id", sa.String(64), nullable=False),
        sa.Column("study", sa.LargeBinary, nullable=False),
        sa.Column("settled", sa.Boolean, nullable=False),
        sa.Column("best", sa.Text, nullable=False),
        sa.Column("line", sa.Text, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("study_id", name="pk_tune_studies"),
    )
    op.create_index("ix_tune_studies_job_id", "tune_studies", ["job_id"])
    op.create_table(
        "tune_trials",
        sa.Column("study_id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("trial", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("study_id", "job_id", "number", name="pk_tune_trials"),
        sa.ForeignKeyConstraint(
            ["study_id"], ["tune_studies.study_id"], name="fk_tune_trials_study_id", ondelete="CASCADE"
        ),
    )
