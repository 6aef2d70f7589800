"""One list says which versions of torch were tested; pages, packages and ``bagua doctor`` say the same."""

import tomllib
from pathlib import Path

from bagua.base.torch_versions import TESTED, minor, numbers
from bagua.cli.checks import machine as checks
from bagua.cli.checks.machine import FAIL, WARN

ROOT = Path(__file__).parents[3]


def test_the_list_ascends_without_a_gap():
    found = [numbers(version) for version in TESTED]
    assert found == [(2, second) for second in range(found[0][1], found[-1][1] + 1)]


def test_the_package_asks_for_the_oldest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={minor(TESTED[0])}" in project["dependencies"]


def test_doctor_says_what_was_not(monkeypatch):
    for second, status in ((numbers(TESTED[-1])[1] + 1, WARN), (99, WARN), (3, FAIL)):
        monkeypatch.setattr(checks, "_installed", lambda *names, second=second: ("torch", f"2.{second}.1+cu130"))
        found = checks.torch()
        assert found.status == status and (status == FAIL or "untested" in found.detail)
