"""How long hosts of a job wait for a silent one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds a column."""
    op.add_column("jobs", sa.Column("patience_s", sa.Float(), nullable=False, server_default="0"))
