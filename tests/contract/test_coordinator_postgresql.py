"""How the store asks PostgreSQL: few answers are waited for, and nothing is lost by that."""

import threading
from dataclasses import replace

import pytest
import sqlalchemy as sa
from rig.coordinator.desk import clocks

from bagua.base.errors import UnavailableError
from bagua.daemon.coordinator.rules.domain import Change, Event, HostRecord, JobRecord, JobState, NodeRecord
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.batch import Batch
from bagua.daemon.coordinator.store.database import open_engine
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2

WAIT_S = 60.0


@pytest.fixture
def store(postgres_url):
    made = Store(open_engine(postgres_url))
    yield made
    made.close()


def job(job_id):
    wire = common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1)
    return JobRecord(job_id, checked_spec(wire), 1.0, master_port=20_001, job_key=b"key")


def node(name, owner):
    return NodeRecord(name, f"host-{name}", "127.0.0.1", 2, "1.0", "boot", 100.0, owner)


@pytest.fixture
def lose_connections(postgres_url):
    """The server ends all connections to the database, as at its restart."""
    ends = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"

    def lose():
        url = sa.make_url(postgres_url).set(drivername="postgresql+psycopg")
        plain = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        with plain.connect() as connection:
            connection.exec_driver_sql(f"{ends} AND datname = current_database()")
        plain.dispose()

    return lose


@pytest.fixture
def answers(monkeypatch):
    """Grows with each answer that a transaction waits for."""
    pipeline = pytest.importorskip("psycopg").Pipeline
    found = []
    for name in ("sync", "__exit__"):
        whole = getattr(pipeline, name)
        monkeypatch.setattr(pipeline, name, lambda *given, name=name, whole=whole: found.append(name) or whole(*given))
    return found


def test_a_round_waits_for_few_answers(store, answers):
    def waits(**more):
        del answers[:]
        assert not Batch("me", 1.0, 1.0, lives=lambda owner: False, **more).write(store).failed
        return len(answers)

    names = [f"job-{number}" for number in range(20)]
    assert waits() == 1  # for the commit
    assert waits(introductions=[node(name, "me") for name in names], gone=names[:5]) == 2  # and the locks of nodes
    assert waits(submissions=[(job(name), "") for name in names]) == 1
    assert waits(submissions=[(job(f"k{name}"), f"key {name}") for name in names]) == 2  # and whose keys are taken
    with store.read() as tx:
        known = tx.stored(names)
    changes = [Change(old, old.job, (Event("a", "b", 0, 1.0),) * 3, "me") for old in known]
    assert waits(changes=changes) == 2  # and the newest revisions
    with store.read() as tx:
        known = tx.stored(names)
    ended = [Change(old, replace(old.job, state=JobState.CANCELLED), (), "me") for old in known[:10]]
    there = [(HostRecord(0, old.job.job_id, "host", "127.0.0.1", "boot", 0, 1),) for old in known]
    taken = [
        Change(old, replace(old.job, state=JobState.STARTING, generation=1, hosts=hosts), (), "me")
        for old, hosts in zip(known[10:], there[10:], strict=True)
    ]
    assert waits(changes=[*ended, *taken]) == 4  # and the locks of the nodes, and what is free on them
    with store.read() as tx:
        assert [event.seq for event in tx.events("job-7", 0, 10)] == [1, 2, 3, 4]
        assert len(tx.nodes()) == 20


def test_few_jobs_are_found_without_reading_all(store):
    """Also on a connection that has asked the same since there was none: its plan would still be one of that time."""
    names = [f"job-{number:04}" for number in range(2000)]
    for _ in range(20):
        with store.transaction() as tx:
            assert tx.stored(names[:5]) == []
    assert not Batch("me", 1.0, 1.0, submissions=[(job(name), "") for name in names]).write(store).failed
    with store.transaction() as tx:
        for _ in range(20):
            assert len(tx.stored(names[:5])) == 5
        count = "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'jobs'"
        assert tx._db.exec_driver_sql(count).scalar_one() == 0


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_a_transaction_leaves_nothing_in_its_session(postgres_url, scheme):
    """A pooler gives the next transaction another session, and this one to somebody else."""
    left = {
        "prepared": "SELECT count(*) FROM pg_prepared_statements",
        "locks": "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
        "settings": "SELECT count(*) FROM pg_settings WHERE source = 'session'",
    }
    store = Store(open_engine(postgres_url.replace("postgresql", scheme, 1)))

    def found():
        with store.transaction() as tx:
            return {name: tx._db.exec_driver_sql(query).scalar_one() for name, query in left.items()}

    try:
        before = found()
        for number in range(12):  # psycopg prepares what was asked five times
            assert not Batch("me", 1.0, 1.0, submissions=[(job(f"job-{number}"), "")]).write(store).failed
            with store.read() as tx:
                assert len(tx.stored(["job-0"])) == 1
        assert found() == before
    finally:
        store.close()


@pytest.mark.parametrize("also", [True, False], ids=["before another answer", "at the commit"])
def test_an_error_of_which_nobody_waits_undoes_the_transaction(store, also):
    with store.transaction() as tx:
        tx.create_job(job("job-1"), None, "me")
    with pytest.raises(sa.exc.IntegrityError, match="pk_jobs"), store.transaction() as tx:
        tx.beat("me", 1.0)
        tx.create_job(job("job-2"), None, "me")
        tx.create_job(job("job-1"), None, "me")
        if also:
            clocks(tx)
    with store.transaction() as tx:
        assert clocks(tx) == {} and list(tx.live()) == ["job-1"]


def test_a_server_that_was_started_again_is_no_error(store, lose_connections):
    for _ in range(2):
        with store.transaction() as tx:
            tx.beat("me", 1.0)
        lose_connections()
    with store.read() as tx:
        assert clocks(tx) == {"me": 1.0}


def test_a_server_that_goes_away_in_a_transaction(store, lose_connections):
    with pytest.raises(UnavailableError, match="does not answer"), store.transaction() as tx:
        tx.beat("me", 1.0)
        assert clocks(tx) == {"me": 1.0}
        lose_connections()
        tx.beat("me", 2.0)
    with store.transaction() as tx:
        assert clocks(tx) == {}


def test_transactions_that_lock_each_other_are_done_again(store):
    with store.transaction() as tx:
        tx.put_nodes([node("a", "me"), node("b", "me")])
    both = threading.Barrier(2)
    tries = []

    def locks(first, second):
        def work(tx):
            tries.append(first)
            tx.lock_nodes([first])
            if tries.count(first) == 1:
                both.wait(WAIT_S)
            tx.lock_nodes([second])
            tx.beat(first, 1.0)

        return work

    other = threading.Thread(target=store.apply, args=(locks("b", "a"),))
    other.start()
    store.apply(locks("a", "b"))
    other.join(WAIT_S)
    assert len(tries) > 2
    with store.read() as tx:
        assert clocks(tx) == {"a": 1.0, "b": 1.0}
