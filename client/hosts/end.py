"""A host's end of ``baguarun``, ``bagua run --hosts`` and ``bagua slurm run``: runs one program there.

It reads an order, one line of JSON, from standard input, or from a file of this user alone (``--order``). Standard
input stays open as long as the program may run: when it closes, the program is ended in good order. SIGTERM and
SIGUSR1, by which a scheduler announces an end, are passed on as SIGTERM, unless whoever gave the order deals with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import IO, Any

from bagua.base.address import own_address
from bagua.base.errors import BaguaError
from bagua.base.paths import make_private_dir, write_private
from bagua.base.run_folder import RunFolder
from bagua.base.secrets import read_private

STOP_PATIENCE_S = 10.0  # between SIGTERM and SIGKILL of the program, once the connection is closed
NOTICE_PATIENCE_S = 5.0  # for a sign, after a signal of the scheduler, that the whole job is ended in another way
# A file beside the order: the job is being ended, and signals that reached its hosts, too, need no answer.
ENDING = "ending"
# Begin of the names of files beside the order: the program on the host of that name ended badly, for this reason.
FAILED = "failed-"


@dataclass(frozen=True)
class Order:
    """A program: ``python -m module arguments``. ``files``: names and contents of files of mode 0600 in a folder of its
    own, which goes with the program. With a ``peer`` (host:port), arguments may have {state}: that folder, {node}: the
    name that Slurm has for this host, {address}: this host's on the way to the peer."""

    module: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    peer: str = ""

    def line(self) -> str:
        """Returns the order as a line, in which it travels."""
        return json.dumps(vars(self))


def main() -> int:
    """Returns the program's exit code, by the shell's convention."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--order", type=Path)
    given = parser.parse_args()
    # Without a buffer: its lock would be the thread's while the interpreter ends.
    source = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    try:
        line = read_private(given.order, "The order of this host") if given.order else source.readline()
        if not line.endswith(b"\n"):
            return 1  # the connection broke before the order was there
        code, words = _run(Order(**json.loads(line)), source, given.order), ""
    except OSError as error:
        code, words = 1, f"{given.order} can't be read on this host: {error.strerror}."
    except BaguaError as error:
        code, words = 1, str(error)
    if words:
        print(f"error: {words}", file=sys.stderr)
    if code and given.order:
        _report_failure(given.order, words or f"It ended with code {code}.")
    return code


def _report_failure(order: Path, words: str) -> None:
    """Tells the giver of the order, who waits for all hosts: a step of srun goes on without one."""
    if not order.with_name(ENDING).exists():
        with contextlib.suppress(OSError):  # the job has ended
            write_private(order.with_name(FAILED + (os.environ.get("SLURMD_NODENAME") or "host")), words.encode())


def _run(order: Order, source: IO[bytes], path: Path | None) -> int:
    os.environ.update(order.environment)
    state = RunFolder() if order.files else None
    try:
        words = _words(order, state)
        for name, content in order.files.items():
            assert state is not None
            make_private_dir((state.path / name).parent)
            write_private(state.path / name, content.encode())
        arguments = [_filled(argument, words) for argument in order.arguments]
        # -P: a folder named like one of our packages must not shadow it.
        command = [sys.executable, "-P", "-m", order.module, *arguments]
        # Standard input and signals are for this end.
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        Thread(target=_end_with_input, args=(source, program), daemon=True).start()
        _pass_on(program, path)
        code = program.wait()
        return 128 - code if code < 0 else code
    finally:
        if state is not None:
            state.remove()


def _words(order: Order, state: RunFolder | None) -> dict[str, str]:
    if not order.peer:
        return {}  # the arguments are a user's
    place = {"{node}": os.environ.get("SLURMD_NODENAME", ""), "{address}": own_address(order.peer)}
    return place if state is None else {**place, "{state}": str(state.path)}


def _filled(argument: str, words: dict[str, Any]) -> str:
    for word, meaning in words.items():
        argument = argument.replace(word, meaning)
    return argument


def _pass_on(program: subprocess.Popen[bytes], path: Path | None) -> None:
    def answer() -> None:
        deadline = time.monotonic() + NOTICE_PATIENCE_S if path is not None else 0.0
        while time.monotonic() < deadline:
            if path is not None and path.with_name(ENDING).exists():
                return
            time.sleep(0.1)
        if program.poll() is None:
            program.terminate()

    def notice(number: int, _: FrameType | None) -> None:
        Thread(target=answer, daemon=True).start()  # a handler must not wait

    # sshd's own way to end a session: the input closes as well, and that ends the program in good order.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, notice)
    signal.signal(signal.SIGUSR1, notice)


def _end_with_input(source: IO[bytes], program: subprocess.Popen[bytes]) -> None:
    source.read()  # nothing more comes: this returns at its end
    program.terminate()
    try:
        program.wait(STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # processes that it has started end with it


if __name__ == "__main__":
    sys.exit(main())
