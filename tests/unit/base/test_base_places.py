"""Surroundings that lack what programs take for granted: errors say what is missing and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.base import address, debugging, paths
from bagua.base.errors import BaguaError, ConfigError
from bagua.csrc import build_cache


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "BAGUA_STATE_DIR", "BAGUA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for place in (paths.state_dir, paths.cache_dir):
        with pytest.raises(ConfigError, match=r"HOME.*\[BG108\]"):
            place()
    with pytest.raises(build_cache.BuildError, match=r"HOME.*\[BG108\]"):
        build_cache.default_cache_dir()


def test_a_loopback_interface_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    address.require_loopback()

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(address.socket, "create_connection", unreachable)
    with pytest.raises(ConfigError, match=r"unreachable.*\[BG923\]"):
        address.require_loopback()


def test_a_debugger_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "bagua.base.debugging.stop")
    with open(os.devnull) as empty, pytest.raises(BaguaError, match=r"\[BG922\]"):
        monkeypatch.setattr(sys, "stdin", empty)
        breakpoint()
    assert debugging.HOW


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server: no answer [BG706] [BG706]", "server: no answer [BG706]"),
        ("server: no answer [BG706]. [BG706]", "server: no answer [BG706]"),
        ("other [BG705] [BG706]", "other [BG705] [BG706]"),
    ],
)
def test_a_code_stands_once(text: str, told: str) -> None:
    assert str(ConfigError(text)) == told


PRINTS = "from bagua.cli import main; main.guarded(lambda: print(chr(0xe4), chr(0x2026)))"
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_output_that_the_locale_can_not_show() -> None:
    ran = subprocess.run([sys.executable, "-c", PRINTS], env={**os.environ, **C_LOCALE}, capture_output=True)
    assert (ran.returncode, ran.stdout) == (0, b"\\xe4 \\u2026\n"), ran.stderr


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    run = "import os, sys; os.chdir(sys.argv.pop()); os.rmdir(os.getcwd()); from bagua.cli.main import main; main()"
    ran = subprocess.run([sys.executable, "-c", run, "run", "x.py", str(gone)], capture_output=True, text=True)
    assert ran.returncode == 2 and "[BG903]" in ran.stderr and len(ran.stderr.splitlines()) == 1
