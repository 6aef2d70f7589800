"""Schemas of other versions: an older one of 1.x comes to the newest, one of a development version is refused."""

import os
from pathlib import Path

import pytest
import sqlalchemy as sa

from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.admin import backup, check
from bagua.daemon.coordinator.rules.domain import Event, JobRecord
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store import database, migrations
from bagua.daemon.coordinator.store.database import open_engine, read_only_url
from bagua.daemon.coordinator.store.migrations import HEAD, KNOWN
from bagua.daemon.coordinator.store.migrations import upgrade as running
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2

NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9000", "{head}", None, None


def upgrade():
    op.add_column("jobs", sa.Column("extra", sa.Integer, nullable=False, server_default="7"))
"""


def give_next_version(monkeypatch, folder):
    """This version becomes one that has a migration more."""
    folder.mkdir()
    (folder / "v9000_next.py").write_text(NEXT.format(head=HEAD))
    config = running.config
    places = os.pathsep.join([f"{Path(migrations.__file__).parent / 'versions'}", str(folder)])

    def with_next(connection):
        made = config(connection)
        made.set_main_option("version_locations", places)
        return made

    monkeypatch.setattr(running, "config", with_next)
    for module in (database, backup, check):
        monkeypatch.setattr(module, "KNOWN", (*KNOWN, "9000"))
        monkeypatch.setattr(module, "HEAD", "9000", raising=False)


def with_a_job(url):
    spec = checked_spec(common_pb2.JobSpec(name="name", entry="t.py", nnodes=1, nproc_per_node=2))
    store = Store(open_engine(url))
    with store.transaction() as tx:
        job = JobRecord("job-1", spec, 1e9, submitted_clock=1.0, job_key=b"key")
        tx.create_job(job, "key", "me", [Event("submitted", "as asked", 0, 1e9)])
    store.close()


def extra(url):
    engine = open_engine(url)
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(sa.text("SELECT job_id, extra FROM jobs"))]
    engine.dispose()
    return found


def test_a_database_of_a_former_version_goes_on(database_url, tmp_path, monkeypatch):
    """In place, and from a backup."""
    with_a_job(database_url)
    backup.back_up(database_url, tmp_path / "backup.db")
    give_next_version(monkeypatch, tmp_path / "next")
    assert "(this version has 9000: a start brings it there)" in check.check_database(database_url).line
    assert extra(database_url) == [("job-1", 7)]
    report = check.check_database(database_url)
    assert report.problems == () and report.schema == "9000"
    backup.restore(tmp_path / "backup.db", database_url, replace=True)
    assert check.check_database(database_url).schema == "9000"
    assert extra(database_url) == [("job-1", 7)]


def test_a_database_of_a_development_version_is_refused_with_words(database_url, tmp_path):
    with_a_job(database_url)
    backup.back_up(database_url, tmp_path / "backup.db")
    for url in (database_url, f"sqlite:///{tmp_path / 'backup.db'}"):
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE alembic_version SET version_num = '0011'"))
        engine.dispose()
    with pytest.raises(ConfigError, match=r"has schema 0011, which a development version before 1\.0 made: .*move"):
        open_engine(database_url)
    with pytest.raises(ConfigError, match=r"schema 0011, .* a development version before 1\.0 made it\. Restore it"):
        backup.restore(tmp_path / "backup.db", database_url, replace=True)
    (problem,) = check.check_database(read_only_url(tmp_path / "backup.db")).problems
    assert problem.endswith("a development version before 1.0 made it")
