"""Nodes say what they speak with each other."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1002"
down_revision = "1001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if all(column["name"] != "wire_version" for column in sa.inspect(op.get_bind()).get_columns("nodes")):
        op.add_column("nodes", sa.Column("wire_version", sa.Integer, nullable=False, server_default="0"))
