"""Lists over every database: pages, beginnings of ids, and what is left out of them."""

from dataclasses import replace

import pytest

from bagua.base.errors import ConflictError, InvalidRequestError, NotFoundError
from bagua.daemon.coordinator.rules.domain import Change, JobRecord, JobState
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store import listing
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2

LARGE = common_pb2.JobSpec(name="large", entry="t.py", args=["x" * 300_000], nnodes=2, nproc_per_node=3, is_module=True)


@pytest.fixture
def store(open_database):
    return Store(open_database())


def submit(store, job_id, created_at=1.0):
    with store.transaction() as tx:
        assert tx.create_job(JobRecord(job_id, checked_spec(LARGE), created_at, job_key=b"k"), None, "me")


def jobs(store, states, limit, token):
    return store.look(lambda tx: listing.jobs(tx, states, limit, token))


def ids(store, limit, *states):
    found = []
    token = ""
    while True:
        page, token = jobs(store, states, limit, token)
        found.append([job.job_id for job in page])
        if not token:
            return found


def test_pages_hold_every_job_once_the_newest_first(store):
    for number, created_at in enumerate([5.0, 1.1, 1.1, 1.1, 0.3, 7.0]):
        submit(store, f"job-{number}", created_at)
    assert ids(store, 2) == [["job-5", "job-0"], ["job-3", "job-2"], ["job-1", "job-4"]]
    assert ids(store, 4) == [["job-5", "job-0", "job-3", "job-2"], ["job-1", "job-4"]]
    assert ids(store, 0) == [["job-5", "job-0", "job-3", "job-2", "job-1", "job-4"]]
    with store.transaction() as tx:
        (old,) = tx.stored(["job-2"])
        tx.save([Change(old, replace(old.job, state=JobState.FAILED), (), "me")])
    assert ids(store, 1, JobState.FAILED) == [["job-2"]]
    _, token = jobs(store, [], 2, "")
    submit(store, "job-6", 9.0)  # what comes meanwhile moves no page
    assert [job.job_id for job in jobs(store, [], 2, token)[0]] == ["job-3", "job-2"]


def test_a_list_has_no_arguments(store):
    submit(store, "job-1")
    (found,), _ = jobs(store, [], 10, "")
    expected = common_pb2.JobSpec()
    expected.CopyFrom(LARGE)
    expected.ClearField("args")
    assert found.spec == expected
    with store.transaction() as tx:
        job = tx.job("job-1")
    assert job is not None and common_pb2.JobSpec.FromString(job.spec.wire) == LARGE


def test_a_token_that_nobody_gave_is_refused(store):
    for token in ("nonsense", "0x1p+9999999:x", ":", "zz:job-1"):
        with pytest.raises(InvalidRequestError, match="page_token"):
            jobs(store, [], 2, token)


def test_a_job_is_found_by_the_beginning_of_its_id(store):
    for job_id in ("job-aa1", "job-aa2", "job-b", "job-bb", "job-A", *(f"job-c{number}" for number in range(9))):
        submit(store, job_id)

    def find(prefix):
        return store.look(lambda tx: listing.find(tx, prefix))

    assert find("job-aa1") == "job-aa1"
    assert find("job-b") == "job-b"  # a whole id is meant, though it begins another
    assert find("job-bb") == "job-bb" and find("job-A") == "job-A"
    with pytest.raises(ConflictError, match=r"'job-a' is the beginning of 2 jobs: job-aa1, job-aa2\. Give more"):
        find("job-a")
    with pytest.raises(ConflictError, match="more than 5 jobs: job-c0, job-c1, job-c2, job-c3, job-c4"):
        find("job-c")
    for prefix in ("job-x", "", "%", "_ob", "job-\0", "x" * 100):
        with pytest.raises(NotFoundError, match="bagua job list"):
            find(prefix)
