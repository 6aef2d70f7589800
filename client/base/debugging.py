"""``breakpoint()`` in a rank that a node daemon has started (PYTHONBREAKPOINT)."""

from __future__ import annotations

import pdb
import sys

from bagua.base.errors import BaguaError

HOW = (
    "A rank has no terminal: its standard input is empty. To debug one rank, start the script by `python SCRIPT`: it "
    "is a job of one rank then, with this terminal. To debug one of several, `pip install debugpy`, call "
    "debugpy.listen(PORT) and debugpy.wait_for_client() in that rank, and attach an editor."
)


def stop(*_: object, **__: object) -> None:
    """Stops in pdb where there is a terminal. Raises BaguaError where there is none: pdb would read the end of its
    input, and end the program by bdb.BdbQuit."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise BaguaError(f"breakpoint(): {HOW} [BG922]")
    debugger = pdb.Pdb()
    debugger.set_trace(sys._getframe(1))  # the program's frame, and not this one
