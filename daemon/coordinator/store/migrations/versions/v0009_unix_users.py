"""The Unix user of an account, and of the jobs that it submits. What was there before has none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds columns."""
    op.add_column("tokens", sa.Column("unix_user", sa.String(200), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("unix_user", sa.String(200), nullable=False, server_default=""))
