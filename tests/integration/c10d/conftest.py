"""Ranks on engines in the test's process (tests/rig)."""

import sys
from pathlib import Path

import pytest
from rig.ranks import engine_hosts

sys.path.insert(0, str(Path(__file__).parent))  # for torch_suite, which ranks run too


@pytest.fixture(scope="session")
def make_ranks():
    """For fixtures that live longer than a test."""
    return engine_hosts.make_ranks


@pytest.fixture
def ranks(tmp_path):
    """Starts ranks on engines in this process; whatever is left is killed at the end."""
    with engine_hosts.make_ranks(tmp_path) as made:
        yield made
