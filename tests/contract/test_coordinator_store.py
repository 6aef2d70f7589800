"""What every database must do for the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from bagua.base.errors import ConfigError, ConflictError, NotFoundError
from bagua.daemon.coordinator import models
from bagua.daemon.coordinator.database import open_engine
from bagua.daemon.coordinator.decide import apply, decide
from bagua.daemon.coordinator.domain import (
    Event,
    HostRecord,
    JobRecord,
    JobState,
    LocalJob,
    LocalRank,
    NodeRecord,
    Options,
    Phase,
    RankRecord,
    RankState,
)
from bagua.daemon.coordinator.migrations import HEAD, KNOWN
from bagua.daemon.coordinator.migrations.upgrade import config, upgrade
from bagua.daemon.coordinator.service import Service
from bagua.daemon.coordinator.store import StaleError, Store
from bagua.daemon.coordinator.translate import checked_spec
from bagua.proto import common_pb2

OPTIONS = Options(lease_s=10, settle_s=1, started_at=0)


@pytest.fixture
def store(open_database: Callable[[], sa.Engine]) -> Store:
    return Store(open_database())


def job(job_id: str = "job-1", created_at: float = 100.25, nnodes: int = 2) -> JobRecord:
    spec = checked_spec(common_pb2.JobSpec(name="näme", entry="t.py", nnodes=nnodes, nproc_per_node=2))
    return JobRecord(job_id, spec, created_at, reason="submitted", master_port=20_001, job_key=b"\0key\xff")


def node(name: str, slots: int = 2, boot_id: str = "boot", owner: str | None = "me") -> NodeRecord:
    return NodeRecord(name, f"host-{name}", "127.0.0.1", slots, "1.0", boot_id, 100.0, owner)


def placed(store: Store, job_id: str = "job-1") -> JobRecord:
    """The job on nodes a and b."""
    with store.transaction() as tx:
        for name in ("a", "b"):
            if tx.node(name) is None:
                tx.put_node(node(name))
        old = job(job_id)
        tx.create_job(old, None)
        views = tx.node_views("me", 0.0, lock=True)
        new, events = apply(old, decide(old, views, 101.0, OPTIONS), 101.0)
        tx.save_job(old, new, events)
        return new


# ---- jobs


def test_a_job_comes_back_as_it_was_written(store: Store):
    with store.transaction() as tx:
        assert tx.create_job(job(), "key")
    with store.transaction() as tx:
        assert tx.job("job-1") == job()
        assert tx.job_by_key("key") == job()
        assert tx.job("job-2") is None and tx.job_by_key("other") is None


def test_a_placed_job_comes_back_with_hosts_ranks_and_generation(store: Store):
    new = placed(store)
    assert new.state is JobState.STARTING
    with store.transaction() as tx:
        assert tx.job("job-1", lock=True) == new
        members = [{"node_id": "a", "first_rank": 0, "nranks": 2}, {"node_id": "b", "first_rank": 2, "nranks": 2}]
        assert tx.generations("job-1") == [(1, members)]


def test_every_field_of_hosts_and_ranks_is_kept(store: Store):
    old = placed(store)
    host = HostRecord(0, "a", "h", "::1", "boot", 0, 2, Phase.STOPPED, "[::1]:5", "broken", 102.5, "waits for b")
    host = replace(
        old.hosts[0], **{f: getattr(host, f) for f in ("phase", "engine_address", "error", "error_at", "waiting")}
    )
    rank = RankRecord(1, 1, "a", RankState.EXITED, 2**31 - 1, -9, 9, "tail ☃", "/log", 102.125, 102.25)
    new = replace(
        old,
        hosts=(host, old.hosts[1]),
        ranks=(old.ranks[0], rank, *old.ranks[2:]),
        state=JobState.STOPPING,
        outcome=JobState.FAILED,
        cancel_reason="cancelled",
        reason="why",
        started_at=1.5,
        stopping_at=2.5,
        finished_at=3.5,
    )
    with store.transaction() as tx:
        tx.save_job(tx.job("job-1") or old, new)
    with store.transaction() as tx:
        assert tx.job("job-1") == new


def test_an_idempotency_key_is_taken_once(store: Store):
    with store.transaction() as tx:
        assert tx.create_job(job("job-1"), "key")
        assert not tx.create_job(job("job-2"), "key")
        assert tx.create_job(job("job-3"), None) and tx.create_job(job("job-4"), None)
        assert tx.job("job-2") is None


def test_jobs_are_counted_by_state(store: Store):
    with store.transaction() as tx:
        for number in range(5):
            tx.create_job(job(f"job-{number}", created_at=float(number)), None)
        old = tx.job("job-3")
        assert old is not None
        tx.save_job(old, replace(old, state=JobState.FAILED))
        assert list(tx.unfinished()) == ["job-0", "job-1", "job-2", "job-4"] == tx.pending()
        assert tx.job_counts() == {JobState.PENDING: 4, JobState.FAILED: 1}


def test_events_are_numbered_within_their_job(store: Store):
    with store.transaction() as tx:
        for name in ("job-1", "job-2"):
            tx.create_job(job(name), None)
            made = tx.save_job(job(name), job(name), [Event("a", "x", 0, 1.0), Event("b", "y", 0, 2.0)])
            assert [event.seq for event in made] == [1, 2]
        made = tx.save_job(job(), replace(job(), reason="new"), [Event("c", "z", 1, 3.0)])
        assert made == (Event("c", "z", 1, 3.0, 3),)
        assert [event.kind for event in tx.events("job-1", 1, 10)] == ["b", "c"]
        assert [event.kind for event in tx.events("job-1", 0, 1)] == ["a"]
        assert len(tx.events("job-2", 0, 10)) == 2


def test_a_stale_result_is_dropped(store: Store):
    with store.transaction() as tx:
        tx.create_job(job(), None)
    with store.transaction() as tx:
        old = tx.job("job-1")
        assert old is not None
        revision = dict(tx._revisions)
        tx.save_job(old, replace(old, reason="faster"))
    with pytest.raises(StaleError), store.transaction() as tx:
        tx._revisions.update(revision)
        tx.save_job(old, replace(old, reason="slower"), [Event("x", "y", 0, 1.0)])
    with store.transaction() as tx:
        found = tx.job("job-1")
        assert found is not None and found.reason == "faster"
        assert tx.events("job-1", 0, 10) == []


def test_an_exception_rolls_everything_back(store: Store):
    with pytest.raises(RuntimeError), store.transaction() as tx:
        tx.create_job(job(), None)
        raise RuntimeError
    with store.transaction() as tx:
        assert tx.job("job-1") is None


def test_a_big_job_is_written_and_read(store: Store):
    with store.transaction() as tx:
        for number in range(20):
            tx.put_node(node(f"n{number:02}", 100))
        wire = common_pb2.JobSpec(entry="t.py", nnodes=20, nproc_per_node=100)
        old = replace(job(), spec=checked_spec(wire))
        tx.create_job(old, None)
        new, events = apply(old, decide(old, tx.node_views("me", 0.0), 101.0, OPTIONS), 101.0)
        tx.save_job(old, new, events)
    with store.transaction() as tx:
        assert tx.job("job-1") == new
        assert all(view.free == 0 for view in tx.node_views("me", 0.0).values())


# ---- leases


def test_a_lease_belongs_to_one_until_it_expires(store: Store):
    with store.transaction() as tx:
        tx.create_job(job(), None)
        assert tx.acquire_lease("job-1", "x", now=0.0, expires_at=10.0)
        assert tx.acquire_lease("job-1", "x", now=1.0, expires_at=11.0)
        assert not tx.acquire_lease("job-1", "y", now=10.9, expires_at=20.0)
        assert not tx.release_lease("job-1", "y")
        assert tx.renew_leases("x", expires_at=15.0) == 1
        assert not tx.acquire_lease("job-1", "y", now=14.0, expires_at=20.0)
        assert tx.acquire_lease("job-1", "y", now=15.0, expires_at=25.0)
        assert tx.renew_leases("x", expires_at=99.0) == 0
        assert tx.release_lease("job-1", "y")
        assert tx.acquire_lease("job-1", "x", now=15.0, expires_at=16.0)
        assert tx.release_leases("x") == 1
        assert not tx.acquire_lease("no such job", "x", now=15.0, expires_at=16.0)


# ---- nodes


def test_nodes_are_kept_and_replaced(store: Store):
    with store.transaction() as tx:
        tx.put_node(node("a"))
        tx.put_node(node("a", slots=8, boot_id="other"))
        assert tx.node("a", lock=True) == node("a", slots=8, boot_id="other")
        assert tx.node("b") is None
        assert tx.node_versions() == {"a": "1.0"}


def test_connected_means_a_session_here_or_a_fresh_one_elsewhere(store: Store):
    with store.transaction() as tx:
        tx.put_node(node("mine"))
        tx.put_node(node("theirs", owner="they"))
        tx.put_node(node("gone", owner=None))

        def connected(since: float) -> list[str]:
            return [name for name, view in tx.node_views("me", since).items() if view.connected]

        assert connected(99.0) == ["mine", "theirs"]
        assert connected(101.0) == ["mine"]
        tx.touch_nodes(["mine", "theirs", "gone"], "they", 105.0)
        assert connected(101.0) == ["mine", "theirs"]
        assert not tx.disconnect_node("theirs", "me", "boot", 106.0)
        assert not tx.disconnect_node("theirs", "they", "older boot", 106.0)
        assert tx.disconnect_node("theirs", "they", "boot", 106.0)
        assert connected(101.0) == ["mine"]
        assert tx.disconnect_all("me") == 1
        assert connected(0.0) == []
        assert tx.node_views("me", 0.0, only=["gone", "nobody"]).keys() == {"gone"}


def test_slots_are_taken_until_the_node_says_stopped_or_its_daemon_is_another(store: Store):
    first = placed(store)

    def used() -> dict[str, int]:
        with store.transaction() as tx:
            return {name: view.used for name, view in tx.node_views("me", 0.0).items()}

    assert used() == {"a": 2, "b": 2}
    ended = replace(first, state=JobState.FAILED, hosts=(replace(first.hosts[0], phase=Phase.STOPPED), first.hosts[1]))
    with store.transaction() as tx:
        tx.save_job(tx.job("job-1") or first, ended)
        assert tx.jobs_on_node("b") == ["job-1"] and tx.jobs_on_node("a") == []
    assert used() == {"a": 0, "b": 2}
    with store.transaction() as tx:
        tx.put_node(node("b", boot_id="restarted"))
    assert used() == {"a": 0, "b": 0}


# ---- use cases


def service(engine: sa.Engine, owner: str, clock: Callable[[], float] = lambda: 200.0) -> Service:
    return Service(Store(engine), owner, OPTIONS, clock, job_lease_s=10.0)


def test_a_job_through_the_service(open_database: Callable[[], sa.Engine]):
    cases = service(open_database(), "me")
    for name in ("a", "b"):
        assert not cases.node_hello(node(name, owner=None))
    submitted = cases.submit(job().spec, "key")
    assert cases.submit(job(nnodes=1).spec, "key").job_id == submitted.job_id
    result = cases.reconcile(submitted.job_id)
    assert result is not None and result.job.state is JobState.STARTING
    for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
        over = tuple(LocalRank(rank, RankState.EXITED) for rank in ranks)
        seen = cases.observe(name, "boot", LocalJob(submitted.job_id, 1, Phase.STOPPED, ranks=over))
        assert seen.changed and seen.freed
        assert not cases.observe(name, "boot", LocalJob(submitted.job_id, 1, Phase.STOPPED, ranks=over)).changed
    states = []
    while not states or not states[-1].terminal:
        result = cases.reconcile(submitted.job_id)
        assert result is not None
        states.append(result.job.state)
    assert states == [JobState.STOPPING, JobState.SUCCEEDED]
    assert [event.kind for event in cases.events(submitted.job_id, 0)][-1] == "state"
    assert cases.cancel(submitted.job_id, "too late").state is JobState.SUCCEEDED
    assert cases.observe("a", "boot", LocalJob("job-unknown", 1, Phase.STARTED)).unknown
    with pytest.raises(NotFoundError, match="no job 'job-unknown'"):
        cases.job("job-unknown")


def test_two_coordinators_do_not_both_decide(open_database: Callable[[], sa.Engine]):
    now = [200.0]
    one, two = (service(open_database(), owner, lambda: now[0]) for owner in ("one", "two"))
    for name in ("a", "b"):
        one.node_hello(node(name))
    job_id = one.submit(job().spec, "").job_id
    first, second = one.reconcile(job_id), two.reconcile(job_id)
    assert first is not None and first.mine and first.job.state is JobState.STARTING
    assert second is not None and not second.mine and not second.changed and second.job == first.job
    now[0] += 11.0  # the first one died
    taken = two.reconcile(job_id)
    assert taken is not None and taken.mine and taken.job.generation == 1


def test_coordinators_that_race_never_oversubscribe(open_database: Callable[[], sa.Engine]):
    """Twelve jobs of two slots for two nodes with four: two fit, whoever asks."""
    cases = [service(open_database(), f"c{number}") for number in range(3)]
    for name in ("a", "b"):
        cases[0].node_hello(node(name, slots=2))
    job_ids = [cases[0].submit(job(nnodes=1).spec, "").job_id for _ in range(12)]
    barrier = threading.Barrier(3)

    def race(case: Service) -> None:
        barrier.wait(10)
        for job_id in job_ids:
            case.reconcile(job_id)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(race, cases))
    found = [cases[0].job(job_id) for job_id in job_ids]
    assert [record.state for record in found].count(JobState.STARTING) == 2
    assert {record.generation for record in found} == {0, 1}
    views, _ = cases[0].nodes()
    assert [(view.node_id, view.used) for view in views] == [("a", 2), ("b", 2)]


def test_the_same_key_from_several_callers_makes_one_job(open_database: Callable[[], sa.Engine]):
    cases = service(open_database(), "me")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: cases.submit(job().spec, "key").job_id, range(8)))
    assert len(found) == 1


def test_a_node_id_in_use_with_another_coordinator_is_refused(open_database: Callable[[], sa.Engine]):
    now = [200.0]
    one, two = (service(open_database(), owner, lambda: now[0]) for owner in ("one", "two"))
    one.node_hello(node("a"))
    assert not two.node_hello(node("a"))  # the same daemon moved over
    with pytest.raises(ConflictError, match="in use by another daemon, on host-a"):
        one.node_hello(node("a", boot_id="other"))
    now[0] += 11.0
    assert one.node_hello(node("a", boot_id="other"))


# ---- schema


def test_the_migrations_make_what_the_code_expects(database_url: str):
    engine = sa.create_engine(database_url)
    try:
        with engine.begin() as connection:
            upgrade(connection)
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        with engine.begin() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert context.get_current_revision() == HEAD
            assert compare_metadata(context, models.metadata) == []
    finally:
        engine.dispose()
    Store(open_engine(database_url)).close()


def test_an_empty_database_gets_the_newest_schema(open_database: Callable[[], sa.Engine]):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with open_database().begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == HEAD
        assert compare_metadata(context, models.metadata) == []


def test_the_known_revisions_are_those_of_the_files(open_database: Callable[[], sa.Engine]):
    from alembic.script import ScriptDirectory

    with open_database().connect() as connection:
        scripts = ScriptDirectory.from_config(config(connection))
    assert tuple(reversed([script.revision for script in scripts.walk_revisions()])) == KNOWN
    assert scripts.get_heads() == [HEAD]


def test_a_newer_schema_is_refused_with_words(database_url: str):
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigError, match=r"has schema 9999, which bagua .* does not know: a newer version made it"):
        open_engine(database_url)


def test_coordinators_that_start_at_once_make_the_schema_once(database_url: str):
    together = threading.Barrier(8)

    def start(_: int) -> sa.Engine:
        together.wait()
        return open_engine(database_url)

    with ThreadPoolExecutor(8) as pool:
        engines = list(pool.map(start, range(8)))
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "can't be read: write sqlite:///FILE"),
        ("mysql://x/y", "'mysql' are not supported"),
        ("postgresql://u:secret@127.0.0.1:1/x", r"u:\*\*\*@127.0.0.1:1/x does not answer .*[Cc]onnection"),
        ("sqlite:////dev/null/x.db", "/dev/null/x.db can't be used: Not a directory"),
    ],
)
def test_a_database_that_can_not_be_used_is_named(url: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        open_engine(url)
    assert "secret" not in str(caught.value)
