"""Which namespaces are ours to remove, and what is refused before anything is made."""

from __future__ import annotations

import os

import pytest

from bagua.base.errors import ConfigError
from bagua.bench import emulation
from bagua.bench.emulation import check_possible, leftovers, namespace_name, start_time
from bagua.tuning.network import Network


def test_only_namespaces_of_processes_that_are_gone_are_left_over() -> None:
    alive = namespace_name(10, 500, 0)
    gone = namespace_name(11, 500, 0)
    reused = namespace_name(12, 500, 1)  # its number belongs to a younger process
    others = ["wr0", "bg12ab", "baguabench-", "baguabench-11-500-0-x", "baguabench-a-b-0"]
    clock = {10: 500, 12: 700}
    assert leftovers([alive, gone, reused, *others], clock.get) == [gone, reused]


def test_this_process_is_not_left_over() -> None:
    started = start_time(os.getpid())
    assert started
    assert leftovers([namespace_name(os.getpid(), started, 0)], start_time) == []
    assert start_time(1 << 30) is None


def test_a_user_without_rights_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="root"):
        check_possible(Network())


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulation, "SEARCH_PATH", "/nowhere")
    with pytest.raises(ConfigError, match="iproute2"):
        check_possible(Network())
