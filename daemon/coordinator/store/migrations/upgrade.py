"""Runs the migrations from inside the package: no ini file, works from an installed wheel."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config


def config(connection: sa.Connection) -> Config:
    """Configuration with which Alembic runs on ``connection``."""
    made = Config()
    # %: Alembic's options are those of configparser.
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    made.attributes["connection"] = connection
    return made


def upgrade(connection: sa.Connection, revision: str = "head") -> None:
    """Brings the schema to ``revision``, inside the transaction of ``connection``."""
    command.upgrade(config(connection), revision)
