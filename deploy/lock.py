"""Pins the packages of the container image: every version, with the hashes that pip demands.

    python3 deploy/dev.py lock [--check]

`container/requirements.txt` has the service's packages, without torch; `container/torch.txt` has torch with what it
needs, and what Bagua's examples need. Both by uv, from the package index that this machine uses. ``--check`` changes
nothing: it ends with code 1 if a file does not fit `pyproject.toml` any more.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import tomllib
from pathlib import Path

from dist import ROOT, call

EXTRAS = ("dashboard", "kubernetes", "postgresql")
PYTHON = "3.11"  # the oldest that is supported: what is pinned for it runs on newer ones, too
FOLDER = ROOT / "deploy" / "container"


def wanted() -> dict[str, list[str]]:
    """Requirements by the name of the file that pins them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    service = [line for line in project["dependencies"] if name_of(line) not in ("torch", "numpy")]
    service += [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    torch = [line for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines() if line[:5] == "torch"]
    examples = project["optional-dependencies"]["examples"]  # the examples of docs/kubernetes.md run in the image
    return {"requirements.txt": service, "torch.txt": [*torch, "numpy", *examples]}


def name_of(requirement: str) -> str:
    """Returns the name in "a-package[extra]>=1"."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return found[0].lower().replace("_", "-")


def pin(file: Path, requirements: list[str]) -> None:
    """Writes the file anew, with the newest versions that fit."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as source:
        source.write("\n".join(requirements) + "\n")
        source.flush()
        options = ["--generate-hashes", "--no-annotate", "--no-emit-index-url", "--quiet", "--no-header"]
        # No index: the mirror of this machine is not for others.
        options += ["--python-version", PYTHON, "--python-platform", "linux", "--output-file", str(file)]
        call([sys.executable, "-m", "uv", "pip", "compile", *options, source.name])
    head = "# Made by `python3 deploy/dev.py lock`. pip install --require-hashes --no-deps -r this file\n"
    file.write_text(head + file.read_text())


def gaps(file: Path, requirements: list[str]) -> list[str]:
    """Requirements whose package the file does not pin within their bounds, and packages without a hash."""
    from packaging.requirements import Requirement

    text = file.read_text() if file.exists() else ""
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s\\;]+)", text, re.MULTILINE))
    missing = []
    for line in requirements:
        asked = Requirement(line)
        version = pinned.get(name_of(line), "")
        if not version or not asked.specifier.contains(version):
            missing.append(line)
    blocks = re.split(r"\n(?=[\w.-]+==)", text)[1:]
    return missing + [block.split()[0] for block in blocks if "--hash=sha256:" not in block]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for name, requirements in wanted().items():
        if not options.check:
            (FOLDER / name).unlink(missing_ok=True)  # uv keeps the versions of a file that is there
            pin(FOLDER / name, requirements)
        if found := gaps(FOLDER / name, requirements):
            sys.exit(f"deploy/container/{name} does not pin: {', '.join(found)}. Run: python3 deploy/dev.py lock")


if __name__ == "__main__":
    main()
