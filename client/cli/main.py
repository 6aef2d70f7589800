"""Entry point of ``bagua``: how errors and an early Ctrl-C are told.

Commands are imported when that is settled: importing them takes a moment, and needs Linux.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from bagua.base.disk import CLOSED, FULL, disk_words
from bagua.base.errors import BaguaError, UsageError
from bagua.base.platforms import require_linux
from bagua.base.text import printable
from bagua.cli.programs import PROGRAMS


def main() -> None:
    """Runs the command line."""
    guarded(_bagua)


def guarded(program: Callable[[], None]) -> None:
    """Runs a program of ours. An error that we raise on purpose is one line and exit code 1 (2: usage); Ctrl-C ends
    with 130 wherever a command has no better plan."""
    signal.signal(signal.SIGINT, _interrupted)
    try:
        require_linux()
        program()
    except UsageError as error:
        _fail(str(error), 2)
    except BaguaError as error:
        _fail(str(error), 1)
    except OSError as error:
        if error.errno not in FULL and not (error.errno in CLOSED and error.filename):
            raise  # a fault of ours, not of a file that was named
        _fail(disk_words(error), 1)


def _bagua() -> None:
    if (program := PROGRAMS.get("".join(sys.argv[1:2]))) is not None:
        program.become(sys.argv[2:])  # at once: a service need not import all other commands first
    from bagua.cli.app import app

    app(prog_name="bagua")


def _fail(words: str, code: int) -> NoReturn:
    print(f"error: {printable(words, lines=True)}", file=sys.stderr)
    if sys.stderr.isatty() and (named := BaguaError(words).code):
        print(f"`bagua explain {named}` says more.", file=sys.stderr)
    sys.exit(code)


def _interrupted(*_: object) -> NoReturn:
    print("Stopped.", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
    main()
