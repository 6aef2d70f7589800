"""Surroundings that lack what programs take for granted: errors say what is missing and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from bagua.base import paths
from bagua.base.errors import ConfigError
from bagua.csrc import build_cache


def test_a_user_without_a_home(monkeypatch):
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "BAGUA_STATE_DIR", "BAGUA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for place in (paths.state_dir, paths.cache_dir):
        with pytest.raises(ConfigError, match=r"HOME.*\[BG108\]"):
            place()
    with pytest.raises(build_cache.BuildError, match=r"HOME.*\[BG108\]"):
        build_cache.default_cache_dir()


def test_a_working_directory_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    run = "import os, sys; os.chdir(sys.argv.pop()); os.rmdir(os.getcwd()); from bagua.cli.main import main; main()"
    ran = subprocess.run([sys.executable, "-c", run, "run", "x.py", str(gone)], capture_output=True, text=True)
    assert ran.returncode == 2 and "[BG903]" in ran.stderr and len(ran.stderr.splitlines()) == 1
