"""Ranks on engines in the test's process (tests/rig)."""

import pytest
from rig.ranks import engine_hosts
from rig.ranks.helpers import find_helpers

find_helpers(__file__)


@pytest.fixture
def ranks(tmp_path):
    """Starts ranks on engines in this process; whatever is left is killed at the end."""
    with engine_hosts.make_ranks(tmp_path) as made:
        yield made
