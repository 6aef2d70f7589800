"""A coordinator whose database is behind PgBouncer in transaction mode."""

import tempfile
from pathlib import Path

import pytest
from rig.programs import program
from rig.system.pgbouncer import pgbouncer

from bagua.base.errors import NotFoundError
from bagua.proto import common_pb2

SPEC = common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1)


@pytest.fixture
def pooled_url(postgres_url):
    program("pgbouncer")
    with tempfile.TemporaryDirectory(prefix="bagua-pooler-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with pgbouncer(postgres_url, folder) as url:
            yield url


def test_a_service_behind_a_pooler(start, connect, pooled_url):
    process = start("--database-url", pooled_url)
    assert not process.error
    connect(process, "node", slots=4)
    with process.client() as client:
        jobs = [client.submit(SPEC, idempotency_key=f"key-{number}") for number in range(30)]
        again = [client.submit(SPEC, idempotency_key=f"key-{number}") for number in range(30)]
        assert [job.job_id for job in jobs] == [job.job_id for job in again]
        for job in jobs:
            client.cancel(job.job_id)
            client.get(job.job_id)
            client.events(job.job_id)
        for number in range(12):
            made = client.accounts.create(f"somebody-{number}", "read")
            assert len(client.accounts.list()) == 1
            client.accounts.revoke(made.token.id)
            assert client.accounts.audit()
        with pytest.raises(NotFoundError):
            client.get("f" * 32)
    code, errors = process.end()
    assert code == 0 and "Traceback" not in errors and "rror" not in errors, errors
