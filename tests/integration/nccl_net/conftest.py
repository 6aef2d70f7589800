"""The plugin, built once, and the fake NCCL that drives it in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua import csrc

sys.path.insert(0, str(Path(__file__).parent))  # for the package netrig, whose programs import it too

from netrig.fake import FakeNccl, Logger, build_logger


@pytest.fixture(scope="session")
def library() -> Path:
    """The plugin's path."""
    return csrc.net_plugin()


@pytest.fixture(scope="session")
def logger_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_logger(tmp_path_factory.mktemp("logger"))


@pytest.fixture
def make(library: Path, logger_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNccl]]:
    """``make(version=11)``: the plugin, started on loopback; finalized at the end."""
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    made: list[FakeNccl] = []

    def start(version: int = 11, **options: bool) -> FakeNccl:
        made.append(FakeNccl(library, Logger(logger_library), version, **options))
        return made[-1]

    yield start
    for nccl in made:
        nccl.finish()


@pytest.fixture
def nccl(make: Callable[..., FakeNccl]) -> FakeNccl:
    """The newest form that NCCL 2.28 takes."""
    return make(11)
