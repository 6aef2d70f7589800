"""Makes the optional wheel ``bagua-prebuilt``: native modules, compiled for common processors and versions of torch.

    python3 deploy/dev.py prebuilt [--out dist] [--levels x86-64-v2,x86-64-v3] [--torch 2.12.0,2.13.0]

Machines that have it need no compiler. `bagua/csrc/prebuilt.py` finds what fits the processor and the sources. Core and
GPU leg need the C and C++ libraries alone: no torch, no CUDA. auditwheel names the oldest Linux that the wheel runs on.
The backend of torch.distributed sees types of torch, so there is one for each version that was tested. It computes
nothing, so one level of processors is enough for it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dist import ROOT, call, epoch

import bagua
from bagua.base.torch_versions import TESTED, numbers
from bagua.csrc import build
from bagua.csrc.prebuilt import LEVELS, LIST, PACKAGE

KINDS = (build.CORE, build.DEVICE)
TORCHS = [one for one in TESTED if sys.version_info < (3, 13) or numbers(one) >= (2, 5)]  # older ones don't know 3.13
KEY = "import sys; from bagua.csrc import build; print(build.prebuilt_key(build.EXTENSIONS[sys.argv[1]]))"
PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "bagua-prebuilt"
version = "{version}"
description = "The native core of Bagua, compiled for common processors"
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
classifiers = ["Operating System :: POSIX :: Linux"]

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
"*" = ["*.json", "*/*.so"]
"""
# Without has_ext_modules the wheel would be named as one for all platforms: setuptools has compiled nothing.
SETUP = """
from setuptools import Distribution, setup

class Native(Distribution):
    def has_ext_modules(self):
        return True

setup(distclass=Native)
"""
README = """
# bagua-prebuilt

The native core of [Bagua](https://github.com/bagua-service/bagua), compiled for common processors, for machines without
a C++ compiler. Install it beside the release of `bagua` that has the same version.
"""


def compile_into(folder: Path, extension: build.Extension, level: str, torch: str = "") -> dict[str, str]:
    """Compiles one module for one level of processors, beside the installed torch or that version; its entry in the
    list."""
    file = f"{level}{torch and f'-torch-{torch}'}/{extension.module}.so"
    target = folder / file
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        environment = {"BAGUA_CORE_MARCH": level}
        if torch:
            packages = f"{cache}/torch"
            call([sys.executable, "-m", "pip", "install", "--quiet", "--target", packages, f"torch=={torch}"])
            environment["PYTHONPATH"] = packages
        made = Path(cache) / extension.kind / "made" / target.name
        made.parent.parent.mkdir()
        call([sys.executable, build.__file__, extension.kind, str(made)], environment)
        shutil.copy(made, target)
        key = call([sys.executable, "-c", KEY, extension.kind], environment).strip()
    call(["strip", "--strip-unneeded", str(target)])
    print(f"{file}: {target.stat().st_size / 1e6:.1f} MB", flush=True)
    return {"kind": extension.kind, "level": level, "key": key, "file": file}


def project(folder: Path, modules: list[dict[str, str]]) -> None:
    """The files around the modules, which lie in ``folder`` already."""
    (folder / PACKAGE / LIST).write_text(json.dumps(modules, indent=1) + "\n")
    (folder / PACKAGE / "__init__.py").write_text('"""The native core of Bagua; see bagua.csrc.prebuilt."""\n')
    (folder / "pyproject.toml").write_text(PYPROJECT.format(version=bagua.__version__, package=PACKAGE))
    (folder / "setup.py").write_text(SETUP)
    (folder / "README.md").write_text(README)
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")


def wheel(folder: Path, out: Path) -> Path:
    """The wheel of that project, named by the oldest Linux that it runs on."""
    environment = {"SOURCE_DATE_EPOCH": str(epoch())}
    call(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "raw"), str(folder)],
        environment,
    )
    raw = next((folder / "raw").glob("*.whl"))
    theirs = [word for name in ("libtorch*", "libc10*") for word in ("--exclude", name)]  # torch brings them
    repair = ["repair", "--plat", "auto", *theirs, "--wheel-dir", str(folder / "fit"), str(raw)]
    call([sys.executable, "-m", "auditwheel", *repair])
    return Path(shutil.copy(next((folder / "fit").glob("*.whl")), out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    known = LEVELS.get(platform.machine(), {})
    parser.add_argument("--levels", default=",".join(known), help="values of -march [default: %(default)s]")
    parser.add_argument("--torch", default=",".join(TORCHS), help="versions of torch [default: %(default)s]")
    options = parser.parse_args()
    levels = options.levels.split(",")
    if not set(levels) <= set(known):
        sys.exit(f"--levels {options.levels}: this machine compiles for {', '.join(known) or 'none'}.")
    lowest = [level for level in known if level in levels][-1]
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / PACKAGE).mkdir()
        made_of = [(kind, level, "") for kind in KINDS for level in levels]
        made_of += [(build.C10D, lowest, version) for version in filter(None, options.torch.split(","))]
        project(folder, [compile_into(folder / PACKAGE, *one) for one in made_of])
        made = wheel(folder, options.out)
    print(made)
    print(subprocess.run([sys.executable, "-m", "auditwheel", "show", made], capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
