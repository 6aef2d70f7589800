"""The installed files are those of the folders, and importing them stays cheap."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import bagua

ROOT = Path(__file__).resolve().parents[3]
PAGES = "bagua.error_pages"
"""Holds Markdown alone."""
RANK_SIDE = ["bagua.torch_api", "bagua.algorithms", "bagua.csrc", "bagua.base", "bagua.proto"]
SERVICE_LIBRARIES = {
    "sqlalchemy",
    "alembic",
    "typer",
    "rich",
    "structlog",
    "pydantic",
    "prometheus_client",
    "cryptography",
}


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def files_of_packages():
    """(package of the package-dir mapping, its folder, file in it). A folder in another one's belongs to its own
    package alone."""
    mapping = {package: ROOT / folder for package, folder in pyproject()["tool"]["setuptools"]["package-dir"].items()}
    for package, folder in mapping.items():
        inner = [other for other in mapping.values() if folder in other.parents]
        for path in folder.rglob("*"):
            if "__pycache__" not in path.parts and not any(other in path.parents for other in inner):
                yield package, folder, path


def packages_in_folders():
    """Dotted names of all folders that hold sources, by the package-dir mapping."""
    return {
        ".".join([package, *path.parent.relative_to(folder).parts])
        for package, folder, path in files_of_packages()
        if path.suffix in (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh") or package == PAGES
    }


def test_package_list_equals_the_folders():
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == packages_in_folders()


def test_requirements_of_programs_for_the_original_keep_this_bagua():
    """Its examples ask for 0.6 to 0.8. A package index has 0.9.2, which pip would put over ours if that were older."""
    assert Version(bagua.__version__) > Version("0.9.2")


def test_manifests_name_the_image_that_is_built_here():
    places = [*ROOT.glob("deploy/kubernetes/**/*.yaml"), *ROOT.glob("docs/**/kubernetes.md")]
    named = {
        tag
        for path in places
        for tag in re.findall(r"(?:/bagua[\w-]*:|image: bagua[\w-]*:|newTag: )(\d[\w.]*)", path.read_text())
    }
    assert named == {bagua.__version__}
    names = {one for path in places for one in re.findall(r"newName: (?:\S*/)?(\S+)", path.read_text())}
    assert names == {"bagua-node"}


def test_wheel_holds_every_source_file():
    files = importlib.metadata.files("bagua") or []
    installed = Path(bagua.__file__).parent
    if not any(str(file) == "bagua/__init__.py" for file in files):
        pytest.skip("editable installation: the wheel is checked by `deploy/dev.py test`")
    missing = []
    for package, folder, path in files_of_packages():
        wanted = path.suffix in (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".proto", ".typed") or package == PAGES
        place = Path(*package.split("."), path.relative_to(folder))
        if wanted and not (installed.parent / place).is_file():
            missing.append(str(place))
    assert missing == []


def imported_by(statement):
    code = f"import sys\n{statement}\nprint(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_import_bagua_imports_nothing():
    assert not imported_by("import bagua") & {"torch", "grpc", "google", *SERVICE_LIBRARIES}


def test_rank_side_needs_torch_grpc_and_protobuf_alone():
    """numpy is not listed: torch imports it by itself where it is installed."""
    assert not imported_by(f"import {', '.join(RANK_SIDE)}") & SERVICE_LIBRARIES


def test_service_side_does_not_import_torch():
    modules = "bagua.cli.app, bagua.client, bagua.daemon.node.__main__, bagua.daemon.coordinator.__main__"
    assert "torch" not in imported_by(f"import {modules}")
