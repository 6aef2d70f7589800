"""Writes the bill of materials (CycloneDX) of the container image's packages, and asks whether any is known as unsafe.

    python3 deploy/dev.py sbom [--out dist] [--audit]

It has every package of `container/requirements.txt` with version, hashes and purl, below bagua itself. The parts that
bagua brings along in its own source (`BUNDLED`) are in it, too. ``--audit``: pip-audit asks the package index for
known vulnerabilities; it ends with code 1 if there are some, and with the reason if nothing can be asked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dist import ROOT, call

import bagua

PINNED = ("requirements.txt", "torch.txt")
BUNDLED = [
    {
        "type": "library",
        "name": "uplot",
        "version": "1.6.32",
        "purl": "pkg:npm/uplot@1.6.32",
        "bom-ref": "uplot",
        "licenses": [{"license": {"id": "MIT"}}],
        "description": "bundled in bagua/dashboard/static/uplot",
    }
]


def bill(pinned: Path) -> dict[str, Any]:
    """The bill of one file of pinned packages, the same from every call."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "bill.json"
        options = ["--output-reproducible", "--of", "JSON", "--sv", "1.6", "--pyproject", str(ROOT / "pyproject.toml")]
        call([sys.executable, "-m", "cyclonedx_py", "requirements", *options, "-o", str(out), str(pinned)])
        found: dict[str, Any] = json.loads(out.read_text())
    found["metadata"]["component"]["version"] = bagua.__version__
    # The tool has written which folders and index this machine uses.
    for component in found["components"]:
        component["externalReferences"] = [one for one in component.get("externalReferences", []) if "hashes" in one]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--audit", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in PINNED:
        pinned = ROOT / "deploy" / "container" / name
        made = bill(pinned)
        if name == PINNED[0]:
            made["components"] += BUNDLED
        path = options.out / f"bagua-{bagua.__version__}-{pinned.stem}.cdx.json"
        path.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
        print(path)
    if options.audit:
        # strict: an index that knows no vulnerabilities would otherwise answer that there are none.
        audit = [sys.executable, "-m", "pip_audit", "--strict", "--require-hashes", "--disable-pip"]
        files = [word for name in PINNED for word in ("-r", str(ROOT / "deploy" / "container" / name))]
        sys.exit(subprocess.run([*audit, *files]).returncode)


if __name__ == "__main__":
    main()
