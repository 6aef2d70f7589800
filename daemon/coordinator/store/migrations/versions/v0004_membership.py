"""Generations of elastic jobs: hosts that are suspended or out, parts of former generations.

Jobs that run meanwhile are none of these: the defaults say so.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds columns."""
    op.add_column("jobs", sa.Column("stalls", sa.Integer, nullable=False, server_default="0"))
    for column in (
        sa.Column("suspended", sa.Text, nullable=False, server_default=""),
        sa.Column("suspended_clock", sa.Float, nullable=False, server_default="0"),
        sa.Column("lost_hosts", sa.Text, nullable=False, server_default=""),
        sa.Column("withdrawn", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("last_generation", sa.Integer, nullable=False, server_default="0"),
    ):
        op.add_column("job_hosts", column)
