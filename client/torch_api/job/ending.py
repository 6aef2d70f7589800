"""Finds out how the program of this process ends: by itself, by an exception that nobody caught, or by SystemExit with
a code.

The others must learn it while this process can still speak: from ``sys.excepthook``, from a finalizer in processes of
``multiprocessing`` (which catch what the program raises), and else from a function of ``atexit``. The interpreter tells
none of these the code of a SystemExit, nor whether one was caught, so two things are noted: the code of the newest one
(``core.on_system_exit``), and the outermost frame of the main thread, which remembers where it ended.
"""

from __future__ import annotations

import bdb
import gc
import multiprocessing.process
import opcode
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import indent
from types import BuiltinFunctionType, FrameType, TracebackType
from typing import NoReturn

from bagua import csrc
from bagua.base import debugging

MOST_WORDS = 1500
_DEEPEST = 8  # causes and groups inside of each other
_WIDEST = 8  # exceptions of a group
_ABOUT_PROCESSES = ("multiprocessing", "subprocess", "concurrent.futures", "torch.multiprocessing", "torch.utils.data")
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class End:
    """``words``: what ends the program before its time, empty if it ends in good order. ``lost``: it is not the
    program's fault: it was interrupted, or the kernel has killed a process that it needs."""

    words: str = ""
    lost: bool = False


GOOD_ORDER = End()


def words_of(error: BaseException, depth: int = 0) -> str:
    """Type and whole message of an exception, with its notes, the exceptions of a group, and its causes."""
    lines = ["".join(traceback.TracebackException(type(error), error, None).format_exception_only()).rstrip()]
    if depth < _DEEPEST:
        if isinstance(error, BaseExceptionGroup):
            lines += [indent(words_of(one, depth + 1), "  ") for one in error.exceptions[:_WIDEST]]
            lines += [f"  and {more} more"] if (more := len(error.exceptions) - _WIDEST) > 0 else []
        if error.__cause__ is not None:
            lines.append(indent(f"caused by {words_of(error.__cause__, depth + 1)}", "  "))
    return _cut("\n".join(lines)) if depth == 0 else "\n".join(lines)


def _cut(text: str) -> str:
    """Escapes characters that UTF-8 or C++ can't hold, and leaves out the middle of a long text."""
    # Surrogates can't be encoded, and C++ ends a text at a zero.
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    if len(text.encode()) > MOST_WORDS:
        # The end has the cause, most often: it is kept, too.
        head, tail = text.encode()[: MOST_WORDS * 3 // 4], text.encode()[-MOST_WORDS // 5 :]
        text = f"{head.decode(errors='ignore')} … {tail.decode(errors='ignore')}"
    return text


def end_by(error: BaseException | None) -> End:
    """The end of a program that this ends, or nothing."""
    if error is None:
        return GOOD_ORDER
    killed = _killed_below(error)
    if not isinstance(error, SystemExit):
        lost = killed or isinstance(error, KeyboardInterrupt)
        advice = f"\n{debugging.HOW} [BG922]" if isinstance(error, bdb.BdbQuit) else ""
        return End(f"{words_of(error)}{killed}{advice}", bool(lost))
    if error.code is None or error.code == 0:
        return GOOD_ORDER
    code = error.code if isinstance(error.code, int) else _repr(error.code)
    # ``raise SystemExit from None`` hides what came before.
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    after = f" after {words_of(before)}" if before is not None else ""
    return End(_cut(f"sys.exit({code})" + after) + killed, bool(killed))


def _repr(code: object) -> str:
    try:
        return repr(code)
    except Exception:
        return f"<{type(code).__name__} without words>"


def _killed_below(error: BaseException) -> str:
    """Words about a process that this one has started and that was killed, if the error comes from what talks to
    processes."""
    if not any(_is_about_processes(one) for one in _chain(error)):
        return ""
    for one in gc.get_objects():  # no module lists the processes that were started: the collector knows all objects
        code = None
        # ``isinstance`` would ask for ``__class__``, which a proxy computes.
        if issubclass(type(one), multiprocessing.process.BaseProcess):
            code = _exit_code(one)
        elif issubclass(type(one), subprocess.Popen):
            code = one.returncode
        if code in _KILLED:
            return f"\nProcess {one.pid}, which this rank had started, was killed by SIGKILL."
    return ""


def _exit_code(process: multiprocessing.process.BaseProcess) -> int | None:
    try:
        return process.exitcode
    except (ValueError, AssertionError):  # it is closed, or another process's
        return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:  # causes may form a circle
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]


def _is_about_processes(error: BaseException) -> bool:
    if isinstance(error, subprocess.SubprocessError):
        return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith(_ABOUT_PROCESSES):
            return True
    return False


class ProgramWatch:
    """Watches the program of this process from the first ``install`` on. ``on_end`` is told an exception that nobody
    has caught as soon as the interpreter says so."""

    def __init__(self) -> None:
        self._root: FrameType | None = None
        self._on_end: Callable[[End], None] | None = None
        self._uncaught: End | None = None
        self._exit: End | None = None  # the newest SystemExit of the main thread
        self._hook: Callable[..., object] | None = None

    def install(self, on_end: Callable[[End], None]) -> None:
        """Installs the hooks. Once they are there it only changes ``on_end``."""
        self._on_end = on_end
        self._root = _outermost(sys._current_frames()[threading.main_thread().ident or 0])
        if self._hook is None:
            csrc.load().on_system_exit(self._note_exit)
        # Another library may have put the interpreter's own back.
        if self._hook is None or sys.excepthook is sys.__excepthook__:
            before = self._hook = sys.excepthook

            def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
                try:
                    before(kind, error, trace)
                finally:
                    self._note_uncaught(error)

            sys.excepthook = hook

    def _note_exit(self, error: SystemExit) -> None:
        # A SystemExit of another thread ends that thread alone.
        if threading.current_thread() is threading.main_thread():
            handled = sys.exception()
            if error.__context__ is None and handled is not error:
                error.__context__ = handled  # as ``raise`` is about to do
            self._exit = end_by(error)

    def _note_uncaught(self, error: BaseException) -> None:
        """Programs call the hook, too, and prompts go on."""
        # A prompt, as of ``python -i``.
        if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
            return
        # Inside the program, its own code has called the hook.
        if _outermost(sys._getframe()) is not self._root and self._on_end is not None:
            self._uncaught = end_by(error)
            self._on_end(self._uncaught)

    def end(self) -> End | None:
        """The end of the program, for functions of atexit. None: it ends by a SystemExit whose code is not known."""
        root = self._root
        if root is None or has_returned(root) or _outermost(sys._getframe()) is root:
            return GOOD_ORDER
        if self._uncaught is not None:
            return self._uncaught
        # 3.12 has last_exc; older ones last_value.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # An error that has passed the outermost frame ends the program.
        if error is not None and error.__traceback__ is not None and error.__traceback__.tb_frame is root:
            return end_by(error)  # somebody else's hook has taken it
        return self._exit


def has_returned(frame: FrameType) -> bool:
    """Returns True if a frame that runs no more has ended by returning, and not by an exception."""
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _exit(status: object = None, /) -> NoReturn:
    """``sys.exit``. Before version 3.12 the interpreter's own makes no SystemExit until somebody looks at it."""
    raise SystemExit(status)


if sys.version_info < (3, 12) and isinstance(sys.exit, BuiltinFunctionType):
    sys.exit = _exit  # at import: ``sys.exit(main())`` looks the function up before a session begins in ``main``


WATCH = ProgramWatch()
