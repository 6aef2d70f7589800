#!/usr/bin/env python3
"""Runs what touches torch with several versions of it, and prints rows for the table in docs/torch-distributed.md.

    python3 tests/torch_versions.py                   all that were tested (client/base/torch_versions.py)
    python3 tests/torch_versions.py 2.4.1 2.13.0      these
    python3 tests/torch_versions.py --packages-of .venv --short 2.8.0    the quick way

Each version gets an environment of its own, ``.venv-torch-VERSION`` (deploy/dev.py develop), of up to 8 GB with CUDA's
libraries. Where PIP_INDEX_URL names an index with builds for the CPU alone, it is 2 GB.
All environments of a checkout share its links for the editable installation, which this makes anew: let no other test
run in the checkout meanwhile.
With ``--packages-of VENV`` only torch is installed. All other packages, and Bagua, are those of that environment of
this checkout (``deploy/dev.py develop``). It takes a minute or two, and disturbs no other tests.
"""

import argparse
import datetime
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = runpy.run_path(str(ROOT / "client" / "base" / "torch_versions.py"))["TESTED"]
API = ("training", "joins", "elastic", "distributed", "amp", "checkpoint")
UNIT = ("torch", "optim", "data")
SHORT = (["tests/integration/c10d"],)  # of the two groups, the one in C++ and some of the other one
RUNS = (
    ["--full", *SHORT[0]],
    [str(path) for name in API for path in (ROOT / "tests" / "integration").rglob(f"test_torch_{name}.py")]
    + [str(path) for name in UNIT for path in sorted((ROOT / "tests" / "unit").rglob(f"test_{name}_*.py"))],
)


def provide(version, packages_of):
    """Python of the version's environment, which is made if it is absent, and the variables for processes of it."""
    venv = ROOT / f".venv-torch-{version}"
    environment = {**os.environ, "BAGUA_TORCH": version, "PYTHONSAFEPATH": "1"}
    environment.pop("BAGUA_VENV", None)
    if packages_of is None:
        subprocess.run([sys.executable, ROOT / "deploy" / "dev.py", "develop"], env=environment, check=True)
    else:
        borrow(version, venv, packages_of)
    return venv / "bin" / "python", environment


def borrow(version, venv, other):
    """An environment with this torch, and behind it the packages of ``other``."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([other / "bin" / "python", "-m", "venv", venv], check=True)
    link = packages(venv) / "zz_packages_of_another.pth"
    if not link.exists():  # torch first: pip would take what the other environment has for installed here
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={version}"], check=True)
        link.write_text(f"import site; site.addsitedir({str(packages(other.absolute()))!r})\n")


def packages(venv):
    """The folder of an environment's packages."""
    (found,) = venv.glob("lib/python3.*/site-packages")
    return found


def run_tests(version, options):
    """The row of a version, and why tests were skipped, or which failed."""
    python, environment = provide(version, options.packages_of)
    build = "import torch, bagua.csrc as native; native.load(); native.load_c10d()"  # takes minutes
    subprocess.run([python, "-c", build], env=environment, check=True)
    counts = Counter()
    words = Counter()
    for chosen in SHORT if options.short else RUNS:
        with tempfile.TemporaryDirectory(prefix="bg-") as folder:  # a short path: Unix sockets lie below it
            files = [f"--basetemp={folder}/t", f"--junitxml={folder}/report"]
            subprocess.run([python, "-m", "pytest", *files, *chosen], cwd=ROOT, env=environment)
            for case in ElementTree.parse(f"{folder}/report").iter("testcase"):
                outcome = next((part for part in case if part.tag in ("skipped", "failure", "error")), None)
                counts["passed" if outcome is None else "skipped" if outcome.tag == "skipped" else "failed"] += 1
                if outcome is not None and outcome.tag == "skipped":
                    words[outcome.get("message", "")] += 1
                elif outcome is not None:
                    words[f"FAILED {case.get('classname')}::{case.get('name')}"] += 1
    today = datetime.date.today()
    return f"| {version} | {counts['passed']} | {counts['skipped']} | {counts['failed']} | {today} |", words


def attempt(version, options):
    """As ``run_tests``; an environment that can't be made, or a run that breaks off, keeps no other version out."""
    try:
        return run_tests(version, options)
    except (subprocess.CalledProcessError, OSError, ValueError, ElementTree.ParseError) as error:
        return f"| {version} | | | | {datetime.date.today()} |", Counter([f"FAILED {error}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS))
    parser.add_argument(
        "--packages-of", type=Path, metavar="VENV", help="install torch alone, beside the packages of this environment"
    )
    parser.add_argument("--short", action="store_true", help="the backend of torch.distributed alone, without --full")
    options = parser.parse_args()
    rows = [attempt(version, options) for version in options.versions]
    print("\n| torch | passed | skipped | failed | date |\n|---|---|---|---|---|", *(row for row, _ in rows), sep="\n")
    for version, (_, words) in zip(options.versions, rows, strict=True):
        print(f"\n{version}:", *(f"{count} x {text}" for text, count in words.most_common()), sep="\n  ")
    return int(any(word.startswith("FAILED") for _, words in rows for word in words))


if __name__ == "__main__":
    sys.exit(main())
