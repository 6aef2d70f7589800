"""Where coordinators are, and since when others can know of them. Those that were there before are no newcomers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds columns."""
    op.add_column("coordinators", sa.Column("address", sa.String(300), nullable=False, server_default=""))
    op.add_column("coordinators", sa.Column("machine", sa.String(200), nullable=False, server_default=""))
    op.add_column("coordinators", sa.Column("arrived_clock", sa.Float(), nullable=False, server_default="0"))
