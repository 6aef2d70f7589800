"""torch's own tests for backends pass: torch_suite.py runs them, torch-suite.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("torch-suite.md")
pytest.importorskip("expecttest", reason="torch's suite needs expecttest")


def listed(outcome: str) -> list[str]:
    return re.findall(rf"^\| `(test_\w+)` \| {outcome}", LIST.read_text(), re.MULTILINE)
