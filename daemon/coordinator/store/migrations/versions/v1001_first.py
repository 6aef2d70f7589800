"""The schema of 1.0: the tables of the models, as long as there is no second revision.

Coordinators make empty databases from the models, without Alembic. This one runs in databases with tables of others,
and for backups. Whoever adds a revision first writes the tables out here, as ``alembic revision --autogenerate`` gives
them; ``test_coordinator_schema`` notices a change of the models without one.
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
