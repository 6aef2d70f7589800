"""The server of forking.py: ``python fork_server.py DESCRIPTOR [MODULE …]``. It imports the modules, and forks for
every request; the child becomes a rank."""

# ruff: noqa: E402 - the first handler of the process's end is registered before anything is imported that registers one

import array
import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

from bagua.base.system_limits import await_readable

exit_code = None
"""Of a rank whose function has returned."""


def leave():
    """Ends a rank whose function has returned. Clearing all modules, as the interpreter does at its end, would make a
    copy of nearly all memory that the rank shares with the server: it takes a second of a core."""
    if exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


atexit.register(leave)  # before all others are registered, so it runs after them

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests

import pytest  # noqa: F401 - what ranks import, and what torch imports late
import torch
import torch._dynamo
import torch.distributed
import torch.distributed.checkpoint

import bagua.torch_api.algorithms  # noqa: F401
from rig.ranks import rank_main

MOST_BYTES = 1 << 20


def serve(channel):
    """Returns in a child, with its request; in the server at the end, with None."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        ready = await_readable([channel, wake_read])
        if wake_read in ready:
            os.read(wake_read, 4096)
            tell_ended(channel)
        if channel in ready:
            message, rights, _, _ = channel.recvmsg(MOST_BYTES, socket.CMSG_SPACE(4))
            if not message:
                channel.close()
                return None
            request = json.loads(message)
            output = array.array("i", rights[0][2])[0]
            if len(os.listdir("/proc/self/task")) > 1:  # a library has started some: a fork is not safe
                os.close(output)
                channel.send(json.dumps({"started": 0}).encode())
                continue
            pid = os.fork()
            if pid == 0:
                become(output)
                for descriptor in (wake_read, wake_write):
                    os.close(descriptor)
                channel.close()
                return dict(request)
            os.close(output)
            channel.send(json.dumps({"started": pid}).encode())


def tell_ended(channel):
    """Takes the exit codes of children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def become(output):
    """A session and output of its own, signals as in a new process."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # ranks need not look for garbage in what they share
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        sys.argv[:] = request["argv"]
        torch.manual_seed(torch.initial_seed())
        rank_main.main()
        exit_code = 0
