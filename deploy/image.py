"""Builds the container image from the checkout.

    python3 deploy/dev.py image --base IMAGE [--target coordinator|node] [--tag bagua] [-- options of the builder]

``--base``: Debian 12 or Ubuntu 24.04 or newer, best by its digest. A wheel ``bagua_prebuilt-*.whl`` in dist/ is
installed, too.
The builder is buildah, podman or docker, whichever is there. A machine that gives no name spaces, such as a container,
builds with: -- --isolation chroot --storage-driver vfs
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dist import ROOT, build_wheel, epoch

import bagua

CONTAINER = ROOT / "deploy" / "container"
BUILDERS = {"buildah": ["bud"], "podman": ["build"], "docker": ["build"]}


def builder() -> list[str]:
    """The beginning of the command that builds an image. Ends the program if there is none."""
    for name, words in BUILDERS.items():
        if found := shutil.which(name):
            return [found, *words]
    sys.exit("No builder of images: install buildah, podman or docker (Debian: apt-get install buildah).")


def context(folder: Path, prebuilt: Path) -> None:
    """Puts together what the Containerfile copies: nothing else of the checkout gets into an image."""
    build_wheel(folder)
    for path in (*CONTAINER.iterdir(), *prebuilt.glob(f"bagua_prebuilt-{bagua.__version__}-*.whl")):
        shutil.copy(path, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--target", choices=("coordinator", "node"), default="node")
    parser.add_argument("--tag", default="bagua")
    parser.add_argument("--prebuilt", type=Path, default=ROOT / "dist", help="folder of the wheel bagua-prebuilt")
    own, words = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, words = own[:at], own[at + 1 :]
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        context(folder, options.prebuilt)
        name = f"{options.tag}-{options.target}:{bagua.__version__}"
        command = [*builder(), "--build-arg", f"BASE={options.base}", "--target", options.target, "--tag", name, *words]
        command += ["--label", f"org.opencontainers.image.version={bagua.__version__}"]
        command += ["--file", str(folder / "Containerfile"), str(folder)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch())}
        sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main()
