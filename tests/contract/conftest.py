"""The databases that a coordinator may use; --algorithm.

SQLAlchemy is imported where it is used: a machine that is lent for GPU tests, which collects this too, has none.
"""

import pytest


def pytest_collection_modifyitems(config, items):
    """With --algorithm nothing but the checks of that algorithm is run."""
    if config.getoption("--algorithm"):
        left_out = [item for item in items if not item.name.startswith("test_stands")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    if request.param == "sqlite":
        from bagua.daemon.coordinator.store.database import sqlite_url

        return sqlite_url(tmp_path / "bagua.db")
    url = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def open_database(database_url):
    """Opens the database; each call is another coordinator."""
    from bagua.daemon.coordinator.store.database import open_engine

    engines = []

    def open_one():
        engines.append(open_engine(database_url))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.dispose()
