"""Entry point of ``bagua``: how errors and an early Ctrl-C are told.

Commands are imported when that is settled: importing them takes a moment, and needs Linux.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import NoReturn

from bagua.base.disk import ending_words
from bagua.base.errors import BaguaError, UsageError
from bagua.base.platforms import require_linux
from bagua.base.system_limits import process_words
from bagua.base.text import printable
from bagua.cli.programs import PROGRAMS


def main() -> None:
    """Runs the command line, and exits with its code."""
    guarded(_bagua)


def guarded(program: Callable[[], None]) -> None:
    """Runs a program of ours. An error that we raise on purpose is one line and exit code 1 (2: usage); Ctrl-C ends
    with 130 wherever a command has no better plan."""
    _prepare_streams()
    signal.signal(signal.SIGINT, _interrupted)
    try:
        require_linux()
        program()
    except UsageError as error:
        _fail(str(error), 2)
    except BaguaError as error:
        _fail(str(error), 1)
    except OSError as error:
        words = f"{process_words()} [BG113]" if error.errno == errno.EAGAIN else ending_words(error)
        if not words:
            raise
        _fail(words, 1)
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # Python has no type of its own for it
            raise
        _fail(f"{process_words()} [BG113]", 1)
    except UnicodeEncodeError as error:
        if error.encoding != "utf-8":
            raise
        text = str(error.object)
        _fail(
            f"{text[:200]!r} is not UTF-8 text: it is sent to the service, which takes no other. Give it in UTF-8, or "
            "give a file another name. [BG102]",
            2,
        )


def _prepare_streams() -> None:
    """Standard streams that are closed lead nowhere: the next file or socket that is opened would take their place, and
    with it what is printed. Characters that the output's encoding does not have are shown by their numbers."""
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # os.open makes none that children get
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):  # the C locale's own way fails for what is no byte that it has read
        sys.stdout.reconfigure(errors="backslashreplace")


def _bagua() -> None:
    if (program := PROGRAMS.get("".join(sys.argv[1:2]))) is not None:
        program.become(sys.argv[2:])  # at once: a service need not import all other commands first
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "The working directory is gone: somebody has removed it. Go to another one: `cd`. [BG903]"
        ) from None
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
