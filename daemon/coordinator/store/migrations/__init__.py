"""Alembic migrations.

``HEAD`` and ``KNOWN`` say without importing alembic which revisions exist; a test compares them with ``versions``.
"""

KNOWN = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011")
HEAD = KNOWN[-1]
