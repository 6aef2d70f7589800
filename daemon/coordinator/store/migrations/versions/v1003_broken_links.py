"""Hosts say with whom they can't talk, and jobs keep it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1003"
down_revision = "1002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    tables = sa.inspect(op.get_bind())

    def add(table: str, column: sa.Column[int] | sa.Column[str]) -> None:
        if all(found["name"] != column.name for found in tables.get_columns(table)):
            op.add_column(table, column)

    for name in ("passes", "stalled_passes"):
        add("jobs", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    for table, name in (("jobs", "accusations"), ("jobs", "put_out"), ("job_hosts", "accused")):
        add(table, sa.Column(name, sa.Text, nullable=False, server_default=""))
