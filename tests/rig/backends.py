"""The two implementations of the backend of ``torch.distributed``, for tests that run over both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bagua.base.errors import BuildError
from bagua.c10d import native


def need(implementation: str) -> None:
    """Skips the test where the C++ backend is wanted and can't be built."""
    if implementation == "cpp":
        try:
            native.load()
        except BuildError as error:
            pytest.skip(f"the C++ backend can't be built here: {error}")


@pytest.fixture(scope="module", params=["cpp", pytest.param("python", marks=pytest.mark.full)])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The implementation of the backend in ranks that are started: see BAGUA_C10D."""
    need(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_C10D", request.param)
        yield request.param
