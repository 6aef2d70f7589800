"""Alembic migrations.

``HEAD`` and ``KNOWN`` say without importing alembic which revisions exist; a test compares them with ``versions``.
"""

KNOWN = ("1001", "1002", "1003")
HEAD = KNOWN[-1]


def before_first(revision: str) -> bool:
    """True for the schema of a development version before 1.0 (0001 to 0011)."""
    return revision < KNOWN[0]


def maker(revision: str) -> str:
    """The version that made a schema that is not among ``KNOWN``, in words."""
    return "a development version before 1.0" if before_first(revision) else "a newer version"
