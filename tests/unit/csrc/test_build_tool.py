"""Programs that benchmarks need: built once, again when the source changes, with the words of a compiler that fails."""

import stat
import subprocess

import pytest

from bagua.csrc.build_tool import TOOLS_DIR, build_tool


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that notes its calls and writes a program that prints its source's name."""
    script = tmp_path / "cxx"
    calls = tmp_path / "calls"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -o ]; do last=$1; shift; done\n'
        'printf "#!/bin/sh\\necho %s\\n" "$last" > "$2"; chmod +x "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return calls


def test_a_program_is_built_once(compiler, tmp_path):
    first = build_tool("memory_floor", tmp_path / "cache")
    assert build_tool("memory_floor", tmp_path / "cache") == first
    assert len(compiler.read_text().splitlines()) == 1
    printed = subprocess.run([str(first)], capture_output=True, text=True, timeout=20).stdout
    assert printed.strip() == str(TOOLS_DIR / "memory_floor.cpp")
    assert build_tool("delay_relay", tmp_path / "cache") != first
