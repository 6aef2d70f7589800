"""Ranks on engines in the test's process (tests/rig)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig import engine_hosts
from rig.engine_hosts import Ranks

from bagua.base.errors import BuildError
from bagua.c10d import native

sys.path.insert(0, str(Path(__file__).parent))  # for torch_suite, which ranks run too


@pytest.fixture(scope="module", params=["cpp", pytest.param("python", marks=pytest.mark.full)])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The implementation of the backend in ranks that are started: see BAGUA_C10D."""
    if request.param == "cpp":
        try:
            native.load()
        except BuildError as error:
            pytest.skip(f"the C++ backend can't be built here: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_C10D", request.param)
        yield request.param


@pytest.fixture(scope="session")
def make_ranks() -> Callable[[Path], contextlib.AbstractContextManager[Ranks]]:
    """For fixtures that live longer than a test."""
    return engine_hosts.make_ranks


@pytest.fixture
def ranks(tmp_path: Path, implementation: str) -> Iterator[Ranks]:
    """Starts ranks on engines in this process; whatever is left is killed at the end."""
    with engine_hosts.make_ranks(tmp_path) as made:
        yield made
