"""How a program's end is told apart, and put into words."""

import subprocess
import sys

import pytest

from bagua.torch_api.job import ending
from bagua.torch_api.job.ending import MOST_WORDS, end_by, words_of


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def noted(error, *notes):
    for note in notes:
        error.add_note(note)
    return error


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(), "ValueError"),
        (RuntimeError("shapes don't fit\n  layer 3\nhint: x"), "RuntimeError: shapes don't fit\n  layer 3\nhint: x"),
        (noted(KeyError("a"), "in file 7"), "KeyError: 'a'\nin file 7"),
        (caused(OSError("late"), ValueError("early")), "OSError: late\n  caused by ValueError: early"),
        (
            ExceptionGroup("two", [KeyError("a"), noted(TypeError("b"), "note")]),
            "ExceptionGroup: two (2 sub-exceptions)\n  KeyError: 'a'\n  TypeError: b\n  note",
        ),
        (ValueError("bad \udcff byte"), "ValueError: bad \\udcff byte"),
        (ValueError("to \0 be told"), "ValueError: to \\x00 be told"),
    ],
)
def test_words_are_whole(error, words):
    assert words_of(error) == words


def test_words_have_an_end():
    assert "Mute" in words_of(Mute())
    loop = ValueError("again")
    loop.__cause__ = loop
    assert words_of(loop).startswith("ValueError: again")
    long = words_of(ValueError("ä" * 10**6))
    assert long.startswith("ValueError: ä") and len(long.encode()) < MOST_WORDS
    many = words_of(ExceptionGroup("many", [KeyError(number) for number in range(100)]))
    assert "and 92 more" in many


def test_an_interrupt_and_a_killed_child_are_losses():
    assert end_by(KeyboardInterrupt()).lost and not end_by(ValueError()).lost
    for code in ("kill -9 $$", "exit 137"):
        with pytest.raises(subprocess.CalledProcessError) as found:
            subprocess.run(["sh", "-c", code], check=True)
        process = subprocess.Popen(["sh", "-c", code])
        process.wait()
        end = end_by(found.value)
        assert end.lost and "was killed by SIGKILL" in end.words
        assert not end_by(ValueError("of the program's own")).lost, "though a process was killed"
        del process
    with pytest.raises(subprocess.CalledProcessError) as found:
        subprocess.run(["sh", "-c", "exit 3"], check=True)
    assert not end_by(found.value).lost


PROGRAM = """
import atexit, importlib.util, sys
held = sys.exit
spec = importlib.util.spec_from_file_location("ending", sys.argv[1])
ending = sys.modules["ending"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ending)
watch = ending.ProgramWatch()
told = []
def begin(code=0):
    watch.install(told.append)
    atexit.register(lambda: print("END", told, watch.end()))
    return code
"""


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("", "[] End(words='', lost=False)"),
        ("sys.exit(0)", "[] End(words='', lost=False)"),
        ("sys.exit(3)", "[] End(words='sys.exit(3)', lost=False)"),
        ("raise SystemExit(3)", "[] End(words='sys.exit(3)', lost=False)"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", "[] End(words='sys.exit(2)', lost=False)"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", "[] End(words='', lost=False)"),
        ("try: sys.exit(3)\nexcept SystemExit: sys.exit()", "[] End(words='', lost=False)"),
        ("raise ValueError(7)", "[End(words='ValueError: 7', lost=False)] End(words='ValueError: 7', lost=False)"),
        ("sys.excepthook = lambda *_: None\nraise ValueError(7)", "[] End(words='ValueError: 7', lost=False)"),
        ("try: 1 / 0\nexcept Exception as error: sys.excepthook(*sys.exc_info())", "[] End(words='', lost=False)"),
        (
            "raise KeyboardInterrupt",
            "[End(words='KeyboardInterrupt', lost=True)] End(words='KeyboardInterrupt', lost=True)",
        ),
        ("import threading; threading.Thread(target=sys.exit, args=(3,)).start()", "[] End(words='', lost=False)"),
    ],
)
def test_a_program_is_watched_to_its_end(program, end):
    assert watched("begin()\n" + program) == end


def watched(program):
    """What ``PROGRAM`` tells at the end of ``program``."""
    command = [sys.executable, "-c", PROGRAM + program, ending.__file__]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout.startswith("END "), ran.stderr
    return ran.stdout[4:].rstrip()


def test_a_session_may_begin_in_what_computes_the_code():
    """``sys.exit(main())`` looks ``sys.exit`` up first."""
    assert watched("sys.exit(begin(0))") == "[] End(words='', lost=False)"
    assert watched("sys.exit(begin(3))") == "[] End(words='sys.exit(3)', lost=False)"
    before_the_import = watched("held(begin(3))")
    assert before_the_import == ("[] None" if sys.version_info < (3, 12) else "[] End(words='sys.exit(3)', lost=False)")
