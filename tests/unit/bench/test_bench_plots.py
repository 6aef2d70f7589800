"""When plots are refused, and which networks make a line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bagua.base.errors import ConfigError
from bagua.bench import plots
from bagua.tuning.network import parse_network


def test_without_matplotlib_plots_are_refused_with_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"bagua\[bench\]"):
        plots.check(tmp_path / "a.png")


def test_names_that_can_not_be_drawn_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    plots.check(tmp_path / "a.PNG")
    with pytest.raises(ConfigError, match=r"\.png"):
        plots.check(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="no folder"):
        plots.check(tmp_path / "no" / "a.png")


def test_lines_over_rate_and_over_delay() -> None:
    networks = [parse_network(text) for text in ("none", "1gbit", "100mbit", "1gbit,5ms", "1gbit,1ms")]
    label, members = plots.over_rate(networks)
    assert label == "bandwidth"
    assert members == [("100mbit", "100mbit"), ("1gbit", "1gbit"), ("none", "unshaped")]
    label, members = plots.over_delay(networks)
    assert label == "latency one way, 1gbit"
    assert members == [("1gbit", "0 ms"), ("1gbit,1ms", "1 ms"), ("1gbit,5ms", "5 ms")]
