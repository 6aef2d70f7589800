"""Runs a program below the system calls and memory rules that a unit of systemd allows, without systemd.

    python service_filter.py UNIT PROGRAM ARGUMENT…

Only ``SystemCallFilter`` and ``MemoryDenyWriteExecute`` are looked at. Needs libseccomp and systemd-analyze.
"""

import ctypes
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

LIBRARY = "libseccomp.so.2"
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
PR_SET_NO_NEW_PRIVS = 38
PR_SET_MDWE = 65


def groups():
    """Names of calls, and of other groups, by the name of a group."""
    command = ["systemd-analyze", "--no-pager", "syscall-filter"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        word = line.strip()
        if line.startswith("@"):
            found[word] = []
        elif found and word and not word.startswith("#"):
            found[list(found)[-1]].append(word)
    return found


def expand(names, known):
    """The calls that these names and groups stand for."""
    calls = set()
    for name in names:
        calls |= expand(known[name], known) if name.startswith("@") else {name}
    return calls


def allowed(unit):
    """The calls that the unit allows, as systemd reads its lines."""
    known = groups()
    calls = expand(["@default"], known)
    for value in re.findall(r"^SystemCallFilter=(.+)$", unit, re.MULTILINE):
        named = expand(value.removeprefix("~").split(), known)
        calls = calls - named if value.startswith("~") else calls | named
    return calls


def close(calls):
    """From now on this process and its children can make no other calls. Raises OSError."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(REFUSE)))
    for name in calls:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            library.seccomp_rule_add(context, ctypes.c_uint32(ALLOW), number, 0)
    code = library.seccomp_load(context)
    if code:
        raise OSError(-code, os.strerror(-code))


def main():
    unit = Path(sys.argv[1]).read_text()
    calls = allowed(unit)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "MemoryDenyWriteExecute=yes" in unit and prctl(PR_SET_MDWE, 1, 0, 0, 0):
        print("this kernel can't deny memory that is written and executed", file=sys.stderr)
    close(calls)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
