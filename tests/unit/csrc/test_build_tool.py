"""Programs that benchmarks need: built once, again when the source changes, with the words of a compiler that fails."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from bagua.csrc import build
from bagua.csrc.build_tool import TOOLS_DIR, build_tool


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_a_program_is_built_once(compiler: Path, tmp_path: Path) -> None:
    first = build_tool("memory_floor", tmp_path / "cache")
    assert build_tool("memory_floor", tmp_path / "cache") == first
    assert len(compiler.read_text().splitlines()) == 1
    printed = subprocess.run([str(first)], capture_output=True, text=True, timeout=20).stdout
    assert printed.strip() == str(TOOLS_DIR / "memory_floor.cpp")
    assert build_tool("delay_relay", tmp_path / "cache") != first


def test_other_flags_make_another_program(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_tool("memory_floor", tmp_path / "cache")
    monkeypatch.setenv("BAGUA_CORE_MARCH", "")
    assert build_tool("memory_floor", tmp_path / "cache") != first
    assert "-march" not in compiler.read_text().splitlines()[-1]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cxx"
    script.write_text("#!/bin/sh\necho no such header\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(build.BuildError, match=r"exit code 3[^§]*no such header"):
        build_tool("memory_floor", tmp_path / "cache")


def test_the_core_is_not_made_of_programs() -> None:
    assert not [path for path in build._sources() if "tools" in path.relative_to(build.SOURCE_DIR).parts]
    assert {path.stem for path in TOOLS_DIR.glob("*.cpp")} >= {"delay_relay", "memory_floor"}
