"""``python -m bagua.accelerate script.py …``, or ``-m module``: runs a program, as it is, with the process group up."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Runs the program that the arguments name, as Python would."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        raise SystemExit("usage: python -m bagua.accelerate (script.py | -m module) [arguments]")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
