"""The tables of the models: the schema of 1.0, and what later revisions have added since.

Coordinators make empty databases from the models, without Alembic. This one runs in databases with tables of others,
and for backups. So a later revision adds a column only where there is none; ``test_coordinator_schema`` notices a
change of the models without a revision.
"""

from __future__ import annotations

from alembic import op

from bagua.daemon.coordinator.store.models import metadata

revision = "1001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    metadata.create_all(op.get_bind(), checkfirst=False)  # never takes a table of others for one of ours
