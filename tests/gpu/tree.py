"""Makes the packages of a working tree importable where nothing can be installed: a copy, by pyproject's mapping."""

import hashlib
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_RUBBISH = shutil.ignore_patterns("__pycache__", "*.pyc")


def package_folders():
    """Top of each package tree ("bagua", "bagua.csrc", ...) and its folder; those that hold others come first."""
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return {name: ROOT / folder for name, folder in sorted(mapping.items())}


def make_site(site):
    """A folder for PYTHONPATH with all packages, made anew."""
    shutil.rmtree(site, ignore_errors=True)
    for name, folder in package_folders().items():
        shutil.copytree(folder, site.joinpath(*name.split(".")), ignore=_RUBBISH, dirs_exist_ok=True)
    return site


def digest():
    """Names the sources of the packages and of these tests: a report is resumed with the same ones only."""
    found = hashlib.sha256()
    folders = [*package_folders().values(), ROOT / "tests" / "gpu", ROOT / "tests" / "contract", ROOT / "tests" / "rig"]
    for path in sorted({path for folder in folders for path in folder.rglob("*") if path.is_file()}):
        if "__pycache__" not in path.parts:
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:20]
