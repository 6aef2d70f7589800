"""Makes ``simulated`` importable, and keeps its log lines off the screen."""

import logging
import sys
from pathlib import Path

import pytest
import structlog

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def silence():
    """Errors of the database are what these tests are made of."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)
