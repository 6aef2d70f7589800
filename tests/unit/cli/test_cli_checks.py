"""The doctor's checks where something is missing. What they find here is a matter of the machine (tests/e2e)."""

from pathlib import Path

import pytest

from bagua.cli.checks import machine as checks
from bagua.cli.checks.machine import FAIL, OK, WARN, Finding


def test_every_check_answers_and_says_how_to_mend() -> None:
    for check in checks.CHECKS:
        found = check()
        assert found.detail
        assert found.status == OK or found.fix, found


def test_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho no header atomic >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = checks.compiler()
    assert (found.status, "can't compile: no header atomic" in found.detail) == (FAIL, True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert checks.compiler().status == FAIL


def test_python_without_header_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.python_headers().status == OK
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    found = checks.python_headers()
    assert (found.status, "apt-get install python3-dev" in found.fix) == (FAIL, True)


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_installed", lambda *names: None)
    assert checks.torch() == Finding("torch", FAIL, "not installed", "pip install torch")
    assert checks.scikit_learn().status == WARN


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda _: {0})
    assert checks.cores().status == WARN
