"""Building the native core: once for all who ask, whatever happens to the builder; errors that say what to do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bagua.csrc import build, build_progress

# The real compiler takes half a minute: a small library stands for the core, everything around it is real.
FAKE = """
    import os, sys, time
    from pathlib import Path
    sys.path.insert(0, {folder!r})
    from bagua.csrc import build
    def compile(extension, folder):
        with open({log!r}, "a") as log:
            log.write("built\\n")
        if os.environ.get("STUCK"):
            (folder / "lock").touch()  # torch leaves one behind when it is killed
            print("stuck", flush=True)
            time.sleep(60)
        time.sleep(0.3)
        (folder / "bagua_core_native.so").write_bytes(b"core")
    build._compile = compile
    sys.exit(build._main(["core", {target!r}]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    """A builder's command line, of the real locking with a quick compiler."""
    target = tmp_path / "core" / "key" / "bagua_core_native.so"
    log = tmp_path / "log"
    code = textwrap.dedent(FAKE.format(folder=str(tmp_path), log=str(log), target=str(target)))
    yield [sys.executable, "-c", code]


def built(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return log.read_text().count("built") if log.exists() else 0


def test_builders_at_once_build_once(tmp_path: Path, command: list[str]) -> None:
    builders = [subprocess.Popen(command) for _ in range(3)]
    assert [builder.wait(30) for builder in builders] == [0, 0, 0]
    assert built(tmp_path) == 1
    assert (tmp_path / "core" / "key" / "bagua_core_native.so").read_bytes() == b"core"
    assert sorted(path.name for path in (tmp_path / "core").iterdir()) == ["key", "key.lock"]


def test_killed_builder_blocks_nobody(tmp_path: Path, command: list[str]) -> None:
    stuck = subprocess.Popen(command, env={**os.environ, "STUCK": "1"}, stdout=subprocess.PIPE)
    assert stuck.stdout is not None
    assert stuck.stdout.readline() == b"stuck\n"
    waiting = subprocess.Popen(command)
    time.sleep(0.2)  # it now waits for the lock
    assert waiting.poll() is None
    stuck.send_signal(signal.SIGKILL)
    stuck.communicate()
    assert waiting.wait(30) == 0
    assert built(tmp_path) == 2
    assert sorted(path.name for path in (tmp_path / "core").iterdir()) == ["key", "key.lock"]


def test_failed_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    shutil.copy(build.SOURCE_DIR / "build.py", sources)
    (sources / "core").mkdir()
    (sources / "core" / "broken.cpp").write_text("int broken( {\n")
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    with pytest.raises(build.BuildError, match=r"broken\.cpp:1:.*error") as raised:
        build.build(tmp_path / "cache")
    assert "bagua doctor" in str(raised.value)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_ninja", lambda: None)
    with pytest.raises(build.BuildError, match="pip install ninja"):
        build.build(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"No C\+\+ compiler.*apt-get install g\+\+"):
        build.build(tmp_path)


def test_missing_header_files_of_python_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's python3 comes without them."""
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _: str(tmp_path / "python3"))
    with pytest.raises(build.BuildError, match=r"there is no .*/python3/Python\.h.*apt-get install python3-dev"):
        build.build(tmp_path)


def test_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.importlib.metadata, "version", missing)
    with pytest.raises(build.BuildError, match="pip install torch"):
        build.core_path()
    assert "PyTorch is not installed" in build.describe()["problem"]


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match="BAGUA_CACHE_DIR"):
        build.build(tmp_path / "file")


def test_broken_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "bagua_core_native.so"
    broken.write_bytes(b"no library")
    with pytest.raises(build.BuildError, match="can't be loaded"):
        build._load(broken)


def test_key_depends_on_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build.core_key()}
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "99.0")
    keys.add(build.core_key())
    monkeypatch.setenv("BAGUA_CORE_MARCH", "")
    keys.add(build.core_key())
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.cpp").write_text("int a;")
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    keys.add(build.core_key())
    (tmp_path / "core" / "a.cpp").write_text("int b;")
    keys.add(build.core_key())
    assert len(keys) == 5
    assert build.core_path(tmp_path).is_relative_to(tmp_path / "core")


def test_sources_have_different_names() -> None:
    """torch's builder puts all objects into one folder."""
    names = [path.stem for path in build._sources() if path.suffix == ".cpp"]
    assert len(names) == len(set(names))


def test_headers_are_parsed_a_few_times_and_every_source_once(tmp_path: Path) -> None:
    """pybind11's by one unit alone: it takes as long as the rest of a folder."""
    units = build._joined(build.CORE, tmp_path)
    assert len(units) <= 12
    assert len({unit.stem for unit in units}) == len(units)
    seen: list[Path] = []
    for unit in units:
        included = re.findall(r'^#include "([^"]+)"$', unit.read_text(), re.MULTILINE)
        seen += [build.SOURCE_DIR / name for name in included] if unit.parent == tmp_path else [unit]
    assert sorted(seen) == [path for path in build._sources() if path.suffix == ".cpp"]
    assert build._joined(build.DEVICE, tmp_path) == build._units(build.DEVICE)


def test_the_core_leaves_printing_and_files_to_those_who_are_for_it() -> None:
    """No debugging output is left: it would print into users' programs, or fill their disks."""
    prints = re.compile(r"\b(v?f?printf|f?puts|fopen)\(|std::(ofstream|cerr|cout)")
    root = Path(build.__file__).parent
    sources = [path for path in root.rglob("*") if path.suffix in (".cpp", ".h", ".cu") and "tools" not in path.parts]
    found = {str(path.relative_to(root)) for path in sources if prints.search(path.read_text())}
    assert found == {
        "core/channel/lifeline.cpp",  # reads /proc/PID/stat
        "nccl_net/log.cpp",  # the log where NCCL gives none
    }


def test_loading_does_not_import_torch() -> None:
    code = "import sys; from bagua.csrc import load; assert load() is load(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


COMPILER = """#!/bin/sh
case "$*" in
  *-dump*|*-v) exec g++ "$@";;
  *-c*c.cpp*) echo c >> {log}; test -e {hold} && {{ echo begun > {begun}; read go < {go}; }};;
  *-c*) echo one >> {log};;
esac
exec g++ "$@"
"""


@pytest.mark.parametrize("alone", [False, True], ids=["builder and compiler killed", "builder killed"])
def test_a_killed_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    sources, target = tmp_path / "csrc", tmp_path / "cache" / "core" / "key" / "bagua_core_native.so"
    (sources / "core").mkdir(parents=True)
    shutil.copy(build.SOURCE_DIR / "build.py", sources)
    for name in "abc":
        (sources / "core" / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}\n")
    files = {name: tmp_path / name for name in ("log", "hold", "begun", "go")}
    files["hold"].touch()
    os.mkfifo(files["begun"])
    os.mkfifo(files["go"])
    (tmp_path / "compiler").write_text(COMPILER.format(**files))
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("MAX_JOBS", "1")
    command = [sys.executable, "-P", str(sources / "build.py"), "core", str(target)]
    builder = subprocess.Popen(command)
    assert files["begun"].read_text() == "begun\n"
    below = psutil.Process(builder.pid).children(recursive=True)
    progress = build.Progress("core", target.parent.with_name("key.build"), 3)
    assert progress.files() == "2 of 3 files"
    for process in [] if alone else below:
        process.kill()
    builder.kill()
    builder.wait()
    files["hold"].unlink()
    again = subprocess.Popen(command)
    if alone:
        files["go"].write_text("go\n")  # the compiler of the killed builder goes on
    assert again.wait(120) == 0
    # One that is over, and that nobody has waited for yet, counts as running for psutil.
    running = [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not running, "the next builder waits for them"
    assert target.is_file() and not progress.folder.exists()
    compiled = files["log"].read_text().split()
    assert compiled.count("one") == 2 and 1 <= compiled.count("c") <= 2


def test_one_process_tells_how_far_a_build_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(build_progress, "LOG_S", 0.001)
    progress = build_progress.Progress("toy", tmp_path / "key.build", 3)
    progress.folder.mkdir()
    told = ""
    with build_progress.told(progress), build_progress.told(progress):
        for name in ("", "a.o", "b.o"):
            if name:
                (progress.folder / name).touch()
            while progress.files() not in told:
                told += capsys.readouterr().err
    lines = told.splitlines()
    assert all(line.startswith("bagua: compiling the toy") for line in lines)
    assert [line.split(": ")[2].split()[0] for line in lines] == sorted(
        line.split(": ")[2].split()[0] for line in lines
    )


def test_nothing_is_told_of_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "told", None)
    monkeypatch.setattr(build, "_paths", {})
    assert build.load().KINDS
