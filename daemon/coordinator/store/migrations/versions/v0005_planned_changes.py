"""Joins and planned changes of elastic jobs, and nodes that drain.

Jobs that run meanwhile are none of these: the defaults say so. Indices of lost hosts became names of nodes.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds columns."""
    for column in (
        sa.Column("plan", sa.Integer, nullable=False, server_default="0"),
        sa.Column("wanted_nodes", sa.Integer, nullable=False, server_default="0"),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("next_member", sa.Integer, nullable=False, server_default="0"),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("retry_clock", sa.Float, nullable=False, server_default="0"),
        sa.Column("respawns", sa.Text, nullable=False, server_default=""),
    ):
        op.add_column("jobs", column)
    for column in (
        sa.Column("entered", sa.Integer, nullable=False, server_default="0"),
        sa.Column("takes_newcomers", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("joining", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("dismissed", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("since_clock", sa.Float, nullable=False, server_default="0"),
    ):
        op.add_column("job_hosts", column)
    for name in ("draining", "leaving"):
        op.add_column("nodes", sa.Column(name, sa.Boolean, nullable=False, server_default=sa.false()))
