"""Alembic's environment: ``upgrade.py`` passes the connection and its transaction."""

from __future__ import annotations

from alembic import context

from bagua.daemon.coordinator.store.models import metadata

connection = context.config.attributes["connection"]
# SQLite changes few things of a table: batches make it anew.
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
context.run_migrations()
