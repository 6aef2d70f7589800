"""Hosts say with whom they can't talk, and jobs keep it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1003"
down_revision = "1002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    names = ("passes", "stalled_passes")
    added = {("jobs", name): sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in names}
    for table, name in (("jobs", "accusations"), ("jobs", "put_out"), ("job_hosts", "accused")):
        added[table, name] = sa.Column(name, sa.Text, nullable=False, server_default="")
    tables = sa.inspect(op.get_bind())
    for (table, name), column in added.items():
        if all(found["name"] != name for found in tables.get_columns(table)):
            op.add_column(table, column)
