"""Backups: made while a coordinator works, checked, and restored into either kind of database."""

import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import pytest
import sqlalchemy as sa
import typer

from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.admin.backup import back_up, restore
from bagua.daemon.coordinator.admin.check import check_database
from bagua.daemon.coordinator.admin.maintenance import check
from bagua.daemon.coordinator.rules.domain import Change, Event, HostRecord, JobRecord, JobState, NodeRecord, Phase
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.database import open_engine, read_only_url, sqlite_url
from bagua.daemon.coordinator.store.migrations import HEAD
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2

SPEC = checked_spec(common_pb2.JobSpec(name="name", entry="t.py", nnodes=1, nproc_per_node=2))


def make_job(store, job_id, state=JobState.PENDING):
    job = JobRecord(job_id, SPEC, 1e9, submitted_clock=1.0, job_key=b"\0\xffkey")
    with store.transaction() as tx:
        tx.create_job(job, f"key of {job_id}", "me", [Event("submitted", "as asked", 0, 1e9)])
        if state is not JobState.PENDING:
            host = HostRecord(0, "a", "h", "::1", "boot", 0, 2, Phase.STOPPED)
            ended = replace(job, state=state, finished_at=2e9, hosts=(host,), generation=1)
            old = tx.stored([job_id])[0]
            tx.save([Change(old, ended, (Event("state", "ended", 1, 2e9),), "me")])


@pytest.fixture
def store(database_url):
    """With three jobs, a node and an archive of code."""
    made = Store(open_engine(database_url))
    make_job(made, "job-1")
    make_job(made, "job-2", JobState.SUCCEEDED)
    make_job(made, "job-3", JobState.FAILED)
    with made.transaction() as tx:
        tx.put_nodes([NodeRecord("a", "h", "::1", 2, "0.1", "boot", 1e9)])
        tx.begin_code("d" * 64, 5, 1e9)
        tx.add_code_piece("d" * 64, 0, b"\0\1\2\3\xff")
        tx.complete_code("d" * 64, 1e9, "default")
        tx.beat("coordinator-1", 77.5)
    yield made
    made.close()


def rows_of(url):
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.connect() as connection:
            return {
                table.name: sorted(
                    tuple(bytes(v) if isinstance(v, memoryview) else v for v in row)
                    for row in connection.execute(sa.select(table)).all()
                )
                for table in m.metadata.sorted_tables
                if table.name != "jobs"
            } | {"jobs": sorted(map(repr, connection.execute(sa.select(m.jobs)).all()))}
    finally:
        engine.dispose()


def test_what_was_backed_up_comes_back(store, database_url, tmp_path):
    before = rows_of(database_url)
    file = tmp_path / "backup.db"
    report = back_up(database_url, file)
    assert report.problems == () and report.schema == HEAD and report.events == 5
    assert report.jobs == {"PENDING": 1, "SUCCEEDED": 1, "FAILED": 1}
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"backup\.db exists already: .*--replace"):
        back_up(database_url, file)
    make_job(store, "job-4")
    store.close()
    with pytest.raises(ConfigError, match=r"The database is not empty: .*--replace"):
        restore(file, database_url)
    restore(file, database_url, replace=True)
    assert rows_of(database_url) == before
    if database_url.startswith("sqlite"):
        (kept,) = tmp_path.glob("bagua.db.before-*[0-9]")
        assert sum(check_database(read_only_url(kept)).jobs.values()) == 4


def test_a_backup_goes_into_the_other_kind_of_database(store, database_url, tmp_path):
    """PostgreSQL or SQLite -> file -> SQLite -> file: the same rows."""
    back_up(database_url, tmp_path / "one.db")
    other = sqlite_url(tmp_path / "other.db")
    restore(tmp_path / "one.db", other)
    assert rows_of(other) == rows_of(database_url)
    back_up(other, tmp_path / "two.db")
    store.close()
    restore(tmp_path / "two.db", database_url, replace=True)
    assert rows_of(other) == rows_of(database_url)
    Store(open_engine(database_url)).close()


def test_a_backup_is_of_one_moment_while_jobs_come(store, database_url, tmp_path):
    """Jobs come with their events and specifications: a copy that was taken in between would have some without."""
    over = threading.Event()
    made = []

    def submit():
        while not over.is_set():
            make_job(store, f"more-{len(made)}", JobState.FAILED)
            made.append("")

    writer = threading.Thread(target=submit)
    writer.start()
    try:
        seen = [sum(back_up(database_url, tmp_path / f"{n}.db").jobs.values()) for n in range(4)]
        reports = [check_database(read_only_url(tmp_path / f"{n}.db")) for n in range(4)]
    finally:
        over.set()
        writer.join()
    assert [report.problems for report in reports] == [()] * 4
    assert seen == sorted(seen)
    assert check_database(database_url).problems == ()


def test_a_restore_refuses_a_coordinator_that_runs(store, database_url, tmp_path):
    back_up(database_url, tmp_path / "backup.db")
    over = threading.Event()

    def beat():
        clock = 100.0
        while not over.wait(0.1):
            clock += 0.1
            with store.transaction() as tx:
                tx.beat("coordinator-2", clock)

    running = threading.Thread(target=beat)
    running.start()
    try:
        with pytest.raises(ConfigError, match=r"A coordinator runs on the database .*Stop all of them"):
            restore(tmp_path / "backup.db", database_url, replace=True)
    finally:
        over.set()
        running.join()


DAMAGE = {
    "events": (
        "DELETE FROM events WHERE job_id = 'job-2' AND seq = 1",
        "job job-2 says that it has 2 events, and 1 are",
    ),
    "specification": ("DELETE FROM job_specs WHERE job_id = 'job-1'", "job job-1 has no specification"),
    "state": ("UPDATE jobs SET state = 42 WHERE job_id = 'job-1'", "job job-1 is in state 42"),
    "end": ("UPDATE jobs SET finished_at = 0 WHERE job_id = 'job-3'", "FAILED, and its end is not written down"),
    "hosts": ("UPDATE job_hosts SET host_index = 1 WHERE job_id = 'job-2'", "not numbered from 0"),
    "code": ("UPDATE code_archives SET bytes = 6", "the archive of code dddddddddddd is not whole: 5 of 6 bytes"),
    "slots": ("UPDATE job_hosts SET phase = 2, nranks = 5, ranks = ''", "node a has 2 slots, and 10 of them are taken"),
    "column": ("ALTER TABLE jobs DROP COLUMN stalls", "the column stalls of table jobs is missing"),
}


DAMAGED = [("sqlite", damage) for damage in DAMAGE] + [("postgresql", damage) for damage in ("slots", "column")]


@pytest.mark.parametrize(("database_url", "damage"), DAMAGED, indirect=["database_url"])
def test_a_check_says_what_does_not_fit(store, tmp_path, database_url, damage):
    statement, words = DAMAGE[damage]
    with store.transaction() as tx:
        tx._db.execute(sa.text(statement))
    report = check_database(database_url)
    assert any(words in problem for problem in report.problems), report.problems
    if damage == "state" and database_url.startswith("sqlite"):
        with pytest.raises(typer.Exit) as ended:
            check(tmp_path / "bagua.db")
        assert ended.value.exit_code == 1
    file = tmp_path / "backup.db"
    if damage == "column" and database_url.startswith("postgresql"):  # rows can't be read without it
        with pytest.raises(ConfigError, match=r"column jobs\.stalls does not exist"):
            back_up(database_url, file)
        return
    back_up(database_url, file)  # better than none, and the report says it
    with pytest.raises(ConfigError, match="is damaged and is not restored: "):
        restore(file, sqlite_url(tmp_path / "new.db"))
    assert not (tmp_path / "new.db").exists()


def test_a_newer_backup_and_what_is_none_are_refused(tmp_path):
    open_engine(sqlite_url(tmp_path / "newer.db")).dispose()
    with closing(sqlite3.connect(tmp_path / "newer.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    target = sqlite_url(tmp_path / "target.db")
    with pytest.raises(ConfigError, match=r"has schema 9999, which bagua .* does not know: a newer version made it"):
        restore(tmp_path / "newer.db", target)
    with closing(sqlite3.connect(tmp_path / "none.db")) as database:
        database.execute("CREATE TABLE t (x)")
    with pytest.raises(ConfigError, match="is not a backup of a coordinator"):
        restore(tmp_path / "none.db", target)
    (tmp_path / "text.db").write_text("no database " * 500)
    with pytest.raises(ConfigError, match=rf"The database {tmp_path}/text\.db is damaged"):
        restore(tmp_path / "text.db", target)
    with pytest.raises(ConfigError, match=r"There is no backup .*absent\.db"):
        restore(tmp_path / "absent.db", target)


def test_a_damaged_file_is_found_and_kept_beside_the_restored_one(tmp_path):
    url = sqlite_url(tmp_path / "bagua.db")
    store = Store(open_engine(url))
    for number in range(50):
        make_job(store, f"job-{number}", JobState.FAILED)
    store.close()
    back_up(url, tmp_path / "backup.db")
    whole = (tmp_path / "bagua.db").read_bytes()
    (tmp_path / "bagua.db").write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    try:
        assert check_database(url).problems
    except ConfigError as error:
        assert "is damaged" in str(error)
    restore(tmp_path / "backup.db", url, replace=True)
    assert check_database(url).problems == ()
    assert list(tmp_path.glob("bagua.db.before-*"))
