"""A program of the original's, ``bagua_install_deps.py``: it says what replaces it, and compiles the core.

The original downloaded NCCL. Here nothing is downloaded: torch brings NCCL, and the core is compiled on this machine.
"""

import sys

from bagua.cli.main import guarded
from bagua_core import install_deps

__all__ = ["install_deps", "main"]

WORDS = (
    "note: nothing is downloaded here: the core is compiled when it is first used. `bagua doctor --build` replaces "
    "this program: it compiles the core, and checks the machine."
)


def main() -> None:
    """Says what replaces this program, and compiles the core."""
    print(WORDS, file=sys.stderr)
    guarded(install_deps)


if __name__ == "__main__":
    main()
