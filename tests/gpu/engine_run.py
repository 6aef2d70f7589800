"""Starts ranks of a section on real engines in the section's process, as the tests of the repository do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rig.engine_hosts import make_ranks
from rig.placing import environment

from gpu.common import free_port


def run_ranks(
    function: Callable[..., Any], hosts: Sequence[Sequence[int]], device: str, route: str, limit_s: float, **more: Any
) -> list[Any]:
    """What ``function`` returned in every rank; it gets ``kind`` (the device), ``port`` (a free one) and ``limit_s``
    beside ``more``. Raises what the rig raises, with the ranks' outputs."""
    with tempfile.TemporaryDirectory() as folder, make_ranks(Path(folder)) as ranks:
        variables = environment(device, route)
        ranks.start(
            function, hosts=hosts, environment=variables, kind=device, port=free_port(), limit_s=limit_s, **more
        )
        ranks.wait(limit_s)
        return [rank.result() for rank in ranks.started]
