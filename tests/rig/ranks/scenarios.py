"""Scenarios that run on the same ranks, one after the other: a test for each of them and each layout of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import bagua.torch_api as bagua
from rig.ranks.engine_hosts import Ranks

Layout = tuple[list[list[int]], str | None]
"""Ranks of every host, and BAGUA_DEFAULT_BUCKET_SIZE; None: the default."""


def run_scenarios(scenarios: Mapping[str, Callable[[], None]], names: list[str]) -> None:
    """In a rank: says on standard output which went well."""
    bagua.init_process_group()
    for name in names:
        scenarios[name]()
        bagua.barrier()
        print(f"passed {name}", flush=True)


def outputs_of(
    make_ranks: Callable[[Path], AbstractContextManager[Ranks]],
    folder: Path,
    layout: Layout,
    function: Callable[..., Any],
    names: list[str],
    deadline_s: float,
) -> list[str]:
    """The output of every rank. ``function(names)`` runs in each; ``deadline_s`` is for hangs alone."""
    hosts, bucket_bytes = layout
    environment = {"BAGUA_DEFAULT_BUCKET_SIZE": bucket_bytes} if bucket_bytes else {}
    with make_ranks(folder) as ranks:
        started = ranks.start(function, hosts=hosts, environment=environment, names=names)
        ranks.wait(deadline_s)
        return [rank.output for rank in started]


def check_passed(outputs: list[str], name: str) -> None:
    """It went well on all ranks."""
    everything = "\n".join(f"rank {rank}:\n{output}" for rank, output in enumerate(outputs))
    assert all(f"passed {name}\n" in output for output in outputs), everything  # the cause may lie in another rank
