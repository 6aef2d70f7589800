"""One list says which versions of torch were tested; pages, packages and ``bagua doctor`` say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bagua.base.torch_versions import TESTED, TESTED_WORDS, minor, numbers
from bagua.cli.checks import machine as checks
from bagua.cli.checks.machine import FAIL, OK, WARN

ROOT = Path(__file__).parents[3]


def test_the_list_ascends_without_a_gap() -> None:
    found = [numbers(version) for version in TESTED]
    assert found == [(2, second) for second in range(found[0][1], found[-1][1] + 1)]


def test_pages_say_what_was_tested() -> None:
    page = (ROOT / "docs" / "torch-distributed.md").read_text()
    assert f"The backend is made for torch {TESTED_WORDS}." in page
    readme = (ROOT / "README.md").read_text()
    assert f"| torch | {minor(TESTED[0])} or newer; tested with [{TESTED_WORDS}](" in readme
    # The version of all tests is not in the table of the others.
    [usual] = re.findall(r"^torch==(\S+)$", (ROOT / "deploy" / "constraints.txt").read_text(), re.M)
    assert f"{minor(usual)} is the version of all other tests." in page
    rows = re.findall(r"^\| (2\.\d+\.\d+) \|", page, re.M)
    assert sorted([*rows, usual], key=numbers) == list(TESTED)


def test_the_package_asks_for_the_oldest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={minor(TESTED[0])}" in project["dependencies"]


@pytest.mark.parametrize("version", [*TESTED, "2.13.0+cpu", "2.4.0"])
def test_doctor_takes_what_was_tested(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_installed", lambda *names: ("torch", version))
    assert checks.torch().status == OK


def test_doctor_says_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for second, status in ((numbers(TESTED[-1])[1] + 1, WARN), (99, WARN), (3, FAIL)):
        monkeypatch.setattr(checks, "_installed", lambda *names, second=second: ("torch", f"2.{second}.1+cu130"))
        found = checks.torch()
        assert found.status == status and (status == FAIL or "untested" in found.detail)
