"""Building the native core: once for all who ask, whatever happens to the builder; errors that say what to do."""

import os
import shutil
import subprocess
import sys
import textwrap

import psutil
import pytest

from bagua.csrc import build

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
def command(tmp_path):
    """A builder's command line, of the real locking with a quick compiler."""
    target = tmp_path / "core" / "key" / "bagua_core_native.so"
    log = tmp_path / "log"
    code = textwrap.dedent(FAKE.format(folder=str(tmp_path), log=str(log), target=str(target)))
    yield [sys.executable, "-c", code]


def built(tmp_path):
    log = tmp_path / "log"
    return log.read_text().count("built") if log.exists() else 0


def test_builders_at_once_build_once(tmp_path, command):
    builders = [subprocess.Popen(command) for _ in range(3)]
    assert [builder.wait(30) for builder in builders] == [0, 0, 0]
    assert built(tmp_path) == 1
    assert (tmp_path / "core" / "key" / "bagua_core_native.so").read_bytes() == b"core"
    assert sorted(path.name for path in (tmp_path / "core").iterdir()) == ["key", "key.lock"]


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_ninja", lambda: None)
    with pytest.raises(build.BuildError, match="pip install ninja"):
        build.build(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"No C\+\+ compiler.*apt-get install g\+\+"):
        build.build(tmp_path)


def test_key_depends_on_what_matters(tmp_path, monkeypatch):
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


def test_loading_does_not_import_torch():
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


@pytest.mark.parametrize("alone", [pytest.param(False, marks=pytest.mark.full), True], ids=["both", "builder"])
def test_a_killed_build_goes_on_where_it_was(tmp_path, monkeypatch, alone):
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
