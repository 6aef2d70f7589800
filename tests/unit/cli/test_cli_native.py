"""Leaving a build of the core ends everything that it started, compilers in process groups of their own too."""

import os

import pytest

from bagua.base.errors import BuildError
from bagua.base.system_limits import await_readable
from bagua.cli.cluster import native
from bagua.csrc.build_progress import Progress

# A builder as ninja makes it: its compiler has a process group of its own. Both hold the fifo open.
_BUILDER = """
import subprocess, sys
held = open({fifo!r}, "w")
subprocess.Popen(["sleep", "300"], stdout=held, process_group=0)
held.write("x")
held.flush()
sys.stdin.read()
import time
time.sleep(300)
"""


def test_leaving_a_build_ends_its_compilers(tmp_path, monkeypatch):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    monkeypatch.setattr(native, "_BUILD", _BUILDER.format(fifo=str(fifo)))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        monkeypatch.setattr(native, "TELL_S", 0.001)
        monkeypatch.setattr(native, "progress", lambda kind: Progress("toy", tmp_path, 3))
        told = []
        with native.NativeBuild() as build:
            assert await_readable([reader], 60.0)
            assert os.read(reader, 1) == b"x"
            assert build.running

            def tell(words):
                told.append(words)
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                build.wait(tell)
            assert "toy" in told[0] and "0 of 3 files" in told[0]
        # The end of the file comes when builder and compiler are both gone.
        assert await_readable([reader], 60.0)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_a_build_that_fails_is_told_in_its_words(monkeypatch):
    monkeypatch.setattr(native, "_BUILD", "raise SystemExit('no compiler: install g++')")
    with native.NativeBuild() as build, pytest.raises(BuildError, match="no compiler: install g"):
        build.wait()
