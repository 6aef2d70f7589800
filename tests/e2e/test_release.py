"""Everything of a release that can be checked without publishing it: the programs beside deploy/dev.py."""

import gzip
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bagua

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "deploy" / "container"
BUILD_S = 1200.0
patient = pytest.mark.timeout(2 * BUILD_S)
"""Compilers and package indexes take minutes on a busy machine."""


def program(name, *arguments, **environment):
    """Runs ``deploy/<name>.py``; its output."""
    command = [sys.executable, str(ROOT / "deploy" / f"{name}.py"), *map(str, arguments)]
    full = {**os.environ, "PYTHONSAFEPATH": "", **environment}
    done = subprocess.run(
        command, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_S
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def module(name, monkeypatch):
    """The same program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    program("dist", "--out", folder)
    return folder


@pytest.mark.full  # unit/deploy/test_packaging.py compares packages
def test_the_wheel_holds_the_checkout(distributions, tmp_path, monkeypatch):
    """It was made from the source distribution, so that holds it, too."""
    dist = module("dist", monkeypatch)
    (wheel,) = distributions.glob("*.whl")
    assert dist.differences(wheel) == []
    spoilt = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(spoilt, "w") as made:
        for name in given.namelist():
            if name != "bagua/py.typed":
                made.writestr(name, given.read(name) + (b"\n" if name == "bagua/version.py" else b""))
        made.writestr("bagua/left_over.py", "")
    assert dist.differences(spoilt) == ["bagua/left_over.py", "bagua/py.typed", "bagua/version.py"]


@pytest.mark.full
@patient
def test_two_builds_are_the_same_and_checkers_agree(distributions, tmp_path):
    pytest.importorskip("twine")
    times = {"SOURCE_DATE_EPOCH": "1700000000"}
    assert "two builds are the same" in program("dist", "--check", "--out", tmp_path, **times)
    for path in distributions.iterdir():
        assert path.read_bytes() != (tmp_path / path.name).read_bytes(), "the time of a release is in it"


@pytest.mark.full
@pytest.mark.slow
@patient
def test_a_prebuilt_wheel_needs_no_compiler(tmp_path):
    pytest.importorskip("auditwheel")
    torch = importlib.metadata.version("torch").partition("+")[0]
    said = program("prebuilt", "--out", tmp_path, "--levels", "x86-64-v2", "--torch", torch)
    assert re.search(r"bagua_prebuilt-\S+-manylinux_2_\d+_\w+\.whl", said)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "packages")
    code = "import bagua.csrc as c; print(c.core_path()); c.load(); c.load_device(); import torch; c.load_c10d()"
    nothing = {"PATH": "/nowhere", "BAGUA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path / "packages")}
    full = {**os.environ, **nothing}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=full, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "x86-64-v2" in done.stdout, done.stderr


def test_every_command_has_a_page(tmp_path):
    program("man", "--out", tmp_path)
    folder = tmp_path / "share" / "man" / "man1"
    pages = {path.name.removesuffix(".1.gz"): gzip.decompress(path.read_bytes()).decode() for path in folder.iterdir()}
    assert {"bagua", "bagua-run", "bagua-job-submit", "bagua-coordinator", "bagua-daemon", "bagua-certs"} <= set(pages)
    assert "bagua\\-coordinator\\-backup" in pages["bagua-coordinator"] and "bagua-coordinator-backup" in pages
    assert "\\-\\-nproc\\-per\\-node" in pages["bagua-job-submit"] and "drain\\-grace" in pages["bagua-daemon"]
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed: the pages' form is not checked")
    text = "\n".join(pages.values())
    groff = ["groff", "-man", "-Tutf8", "-Kutf8", "-ww", "-z"]
    done = subprocess.run(groff, input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_shells_complete_commands():
    asked = {"_BAGUA_COMPLETE": "complete_bash", "COMP_WORDS": "bagua jo", "COMP_CWORD": "1"}
    command = [sys.executable, "-P", "-m", "bagua.cli.main"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60)
    assert "job" in done.stdout, done.stderr


def test_packages_of_the_image_are_pinned(monkeypatch):
    pytest.importorskip("packaging")
    lock = module("lock", monkeypatch)
    for name, requirements in lock.wanted().items():
        assert lock.gaps(CONTAINER / name, requirements) == [], "run: python3 deploy/dev.py lock"


@pytest.mark.full
def test_the_bill_of_materials_names_every_package(tmp_path):
    pytest.importorskip("cyclonedx_py")
    program("sbom", "--out", tmp_path)
    for path in tmp_path.iterdir():
        bill = json.loads(path.read_text())
        pinned = (CONTAINER / f"{path.name.split('-')[2].split('.')[0]}.txt").read_text()
        found = {(one["name"], one["version"]) for one in bill["components"] if "npm" not in one["purl"]}
        assert found == set(re.findall(r"^([\w.-]+)==([^\s\\]+)", pinned, re.MULTILINE))
        assert bill["metadata"]["component"]["version"] == bagua.__version__
        assert str(ROOT) not in path.read_text()
    assert (ROOT / "client" / "dashboard" / "static" / "uplot").is_dir(), "then BUNDLED in sbom.py has one too many"


def test_the_workflow_is_understood():
    pytest.importorskip("check_jsonschema")
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    text = workflow.read_text()
    assert "secrets." not in text
    assert set(re.findall(r"dev\.py (\w+)", text)) == {"test", "dist", "lock", "sbom", "prebuilt"}
    assert all(re.search(r"@[0-9a-f]{40} # v", line) for line in text.splitlines() if "uses:" in line)


def test_the_workflow_is_safe():
    zizmor = Path(sys.executable).with_name("zizmor")
    if not zizmor.exists():
        pytest.skip("zizmor is not installed")
    command = [str(zizmor), "--offline", "--no-progress", str(ROOT / ".github" / "workflows" / "release.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
