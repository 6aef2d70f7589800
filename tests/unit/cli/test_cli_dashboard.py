"""Needs of ``bagua top`` before it begins."""

from __future__ import annotations

import io

import pytest

from bagua.base.errors import UsageError
from bagua.cli.top import top


def test_top_without_a_terminal_says_what_to_call_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drew on standard error for ever, and no key could end it."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageError, match=r"needs a terminal.*bagua job list.*BG112"):
        top()
