"""The commands of docs/operations.md that move a service from SQLite to PostgreSQL, as they stand there."""

import os
import shutil
import subprocess
import sys
from contextlib import closing

import pytest
import sqlalchemy as sa
from rig.docs import pages
from rig.limits import SOON_S

from bagua.daemon.coordinator.rules.domain import Event, JobRecord
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2

PROGRAM = f"{sys.executable} -P -m bagua.cli.main"
NAME = "test_coordinator_maintenance.py::test_a_service_moves_to_postgresql"


@pytest.fixture
def server(postgres_server):
    """Variables by which PostgreSQL's own programs find a server that has neither a role nor a database ``bagua``."""
    missing = [name for name in ("createuser", "createdb", "runuser") if shutil.which(name) is None]
    if missing or os.geteuid() != 0 or "BAGUA_TEST_POSTGRES_URL" in os.environ:
        pytest.skip("needs root, a server of its own, and PostgreSQL's programs (Debian: postgresql)")
    url = sa.make_url(postgres_server)
    if url.host is None or subprocess.run(["id", "postgres"], capture_output=True).returncode:
        pytest.skip("there is no user postgres, or the server has no port")
    found = {"PGHOST": url.host, "PGPORT": str(url.port)}
    try:
        yield found
    finally:
        for words in ("dropdb --if-exists --force bagua", "dropuser --if-exists bagua"):
            command = ["runuser", "-u", "postgres", "--", *words.split()]
            subprocess.run(command, env={**os.environ, **found}, cwd="/", capture_output=True, timeout=SOON_S)


@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_service_moves_to_postgresql(tmp_path, server):
    """Its jobs are there afterwards, in a database that belongs to the role of the page."""
    (tmp_path / "coordinator").mkdir()
    store = Store(open_engine(sqlite_url(tmp_path / "coordinator" / "bagua.db")))
    spec = checked_spec(common_pb2.JobSpec(name="name", entry="t.py", nnodes=1, nproc_per_node=2))
    job = JobRecord("job-1", spec, 1e9, submitted_clock=1.0, job_key=b"key")
    with closing(store), store.transaction() as tx:
        tx.create_job(job, "key", "me", [Event("submitted", "as asked", 0, 1e9)])
    blocks = [block for block in pages.of_page("operations") if block.reason.endswith(NAME)]
    settings = tmp_path / "coordinator.env"
    url = f"postgresql://bagua@{server['PGHOST']}:{server['PGPORT']}/bagua"
    text = "systemctl() { :; }\n" + "\n".join(block.text for block in blocks)
    for here, there in (
        ("postgresql:///bagua", url),
        ("bagua-admin", PROGRAM),
        ("/var/lib/bagua", str(tmp_path)),
        ("/etc/bagua/coordinator.env", str(settings)),
    ):
        assert here in text
        text = text.replace(here, there)
    env = {**os.environ, **server, "BAGUA_STATE_DIR": str(tmp_path)}
    # One program after the other, with a start of Python each.
    done = subprocess.run(["sh", "-eu", "-c", text], env=env, capture_output=True, text=True, timeout=8 * SOON_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("1 jobs (1 PENDING), 1 events"), done.stdout
    assert settings.read_text() == f"BAGUA_COORDINATOR_DATABASE_URL={url}\n"
