"""Fixtures for tests of several folders.

A PostgreSQL server: the one of BAGUA_TEST_POSTGRES_URL, else the system's binaries, else a skip that says so.
SQLAlchemy is imported where it is used: a machine that is lent for GPU tests has none.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import pwd
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests/rig, and helpers of one folder that ranks import too

from rig import shares
from rig.ports import free_port
from rig.programs import missing
from rig.system.postgres import as_postgres, binaries

# For all that tests start: on a machine with more busy processes than cores, threads of OpenMP that wait for each other
# cost more than they bring. The daemon's own setting has a test of its own (unit/node/test_node_launch.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all tests are known: modules are no garbage, and looking for it took a quarter of that time
if os.environ.get("CI"):
    pytest.importorskip = lambda name, **_: importlib.import_module(name)  # a package that is missing fails there
START_S = 30.0
DROPS = 5
"""Attempts to empty a database."""


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests marked 'full' too: everything, up to 1 GiB")
    parser.addoption(
        "--algorithm",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="in tests/contract: check this algorithm, too (may be repeated)",
    )
    parser.addoption(
        "--device",
        choices=["cpu", "fake", "cuda"],
        default="cpu",
        help="in tests/contract: where ranks train; fake: through the GPU leg, without a GPU",
    )
    parser.addoption(
        "--route",
        choices=["", "staged", "flat", "hierarchical"],
        default="",
        help="with --device: how operations travel; otherwise as the leg chooses",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "job(world, name): what ranks of the contract suite must have done")
    config.addinivalue_line("markers", "full: runs with --full only (see tests/README.md)")
    with contextlib.suppress(ImportError):  # a machine that is lent for GPU tests has no hypothesis
        from hypothesis import settings

        # The same examples in every run; --full looks for new ones.
        settings.register_profile("same", derandomize=True, deadline=None)
        settings.register_profile("new", deadline=None, print_blob=True)
        settings.load_profile("new" if config.getoption("--full") else "same")


def pytest_collection_modifyitems(config, items):
    """Leaves tests marked ``full`` out where ``--full`` is not given: they would fill the screen as skipped. Puts long
    files first in the processes of pytest-xdist."""
    if not config.getoption("--full"):
        left_out = {item for item in items if item.get_closest_marker("full")}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: shares.place_in_order(item.nodeid))


def pytest_collection_finish():
    """From now on garbage is looked for, but not among modules and tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Which process runs which tests."""
    return shares.scheduler(config, log)


@pytest.fixture
def short_folder():
    """A folder with a short path, for Unix sockets: Linux takes paths of at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bg-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def pools():
    """Ranks that stay, for tests whose functions take milliseconds: ``pools([0, 1]).run(function, argument=...)``."""
    from rig.ranks.pool import Pools  # imports torch

    made = Pools()
    yield made
    made.close()


@contextlib.contextmanager
def system_server(bin_dir, prefix):
    with tempfile.TemporaryDirectory(prefix="bagua-pg-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if prefix:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
        initdb = [*prefix, bin_dir / "initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "--no-sync"]
        subprocess.run([*initdb, "-E", "UTF8", "--locale", "C"], check=True, capture_output=True, cwd="/", timeout=120)
        port = free_port()
        options = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", "fsync=off"]
        command = [*prefix, bin_dir / "postgres", "-D", folder / "data"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *(part for option in options for part in ("-c", option))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        try:
            url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
            wait_until_it_answers(url, process, folder / "log")
            yield url
        finally:
            stop = [*prefix, bin_dir / "pg_ctl", "-D", folder / "data", "-m", "fast", "-w", "-t", "20", "stop"]
            subprocess.run(stop, capture_output=True, cwd="/", timeout=60)
            process.wait(20)


def wait_until_it_answers(url, process, log):
    """PostgreSQL has no ready line: connecting is the test."""
    import sqlalchemy as sa

    engine = sa.create_engine(url)
    deadline = time.monotonic() + START_S
    try:
        while True:
            try:
                with engine.connect():
                    return
            except sa.exc.OperationalError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
    finally:
        engine.dispose()


@pytest.fixture(scope="session")
def postgres_server():
    """The URL of a server on which databases may be made."""
    url = os.environ.get("BAGUA_TEST_POSTGRES_URL")
    if url:
        yield url.replace("postgresql://", "postgresql+psycopg://", 1)
        return
    bin_dir, prefix = binaries(), as_postgres()
    if bin_dir is not None and prefix is not None:
        with system_server(bin_dir, prefix) as url:
            yield url
        return
    missing("PostgreSQL: no BAGUA_TEST_POSTGRES_URL, and no binaries on this machine")


@pytest.fixture(scope="session")
def postgres_database(postgres_server):
    """The URL of a database of our own on that server."""
    import sqlalchemy as sa

    name = f"bagua_test_{secrets.token_hex(6)}"
    admin = sa.create_engine(postgres_server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        url = sa.make_url(postgres_server).set(drivername="postgresql", database=name)
        yield url.render_as_string(hide_password=False)
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        admin.dispose()


@pytest.fixture
def postgres_url(postgres_database):
    """The URL of an empty database."""
    import sqlalchemy as sa

    yield postgres_database
    engine = sa.create_engine(sa.make_url(postgres_database).set(drivername="postgresql+psycopg"))
    for left in reversed(range(DROPS)):
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql("DROP SCHEMA public CASCADE")
                connection.exec_driver_sql("CREATE SCHEMA public")
            break
        except sa.exc.OperationalError:  # a deadlock with a coordinator that still runs
            if not left:
                raise
    engine.dispose()
