#!/usr/bin/env python3
"""Measures the start of many ranks from a daemon with a large heap: ``bagua_core.spawn`` beside Python's subprocess.

    python tests/bench/spawn.py
    python tests/bench/spawn.py --heap-mib 50 --ranks 64

Either way the child ends when its parent dies. Nothing is asserted: times depend on the machine.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import time

import bagua.csrc

COMMAND = ["/bin/sleep", "60"]
_PR_SET_PDEATHSIG = 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heap-mib", type=int, default=2_000)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    heap = [bytearray(os.urandom(4_096) * 256) for _ in range(options.heap_mib)]  # touched, so it is really there
    for name, start in ways().items():
        pids = []
        began = time.perf_counter()
        worst = 0.0
        for _ in range(options.ranks):
            before = time.perf_counter()
            pids.append(start())
            worst = max(worst, time.perf_counter() - before)
        took = time.perf_counter() - began
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(f"{name:8} {len(heap)} MiB: {took:.2f} s, the longest call {worst * 1e3:.0f} ms")


def ways():
    """How a child may be started; each returns its pid."""
    core = bagua.csrc.load()
    libc = ctypes.CDLL(None)
    parent = os.getpid()
    null = os.open(os.devnull, os.O_WRONLY)

    def ask_for_death_signal():
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(127)

    streams = {"stdin": subprocess.DEVNULL, "stdout": null, "stderr": null, "start_new_session": True}
    return {
        "core": lambda: int(core.spawn(COMMAND, dict(os.environ), "/", null, null)),
        "preexec": lambda: subprocess.Popen(COMMAND, preexec_fn=ask_for_death_signal, **streams).pid,
    }


if __name__ == "__main__":
    main()
