"""A rank of a launch, in its own process."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from bagua.base.parent_process import die_with_parent
from bagua.torch_api.job import start
from bagua.torch_api.job.reports import Report, on_report

REPORT_EVERY_S = 0.1
Call = Callable[[], Any]


def run(
    call: Call | bytes, environment: Mapping[str, str], channel: Connection, output: Connection, parent: int
) -> None:
    """Runs ``call`` as one rank: the main function of a process. ``call``: a function, or its cloudpickle. Sends to
    ``channel`` the reports (rank 0) and the outcome: ("report", step, total, metrics, message), ("result", pickle) or
    ("error", traceback). ``output``: gets all that is printed. ``parent``: pid of the process that launched this one,
    which ends with it."""
    if not die_with_parent(signal.SIGKILL, parent):  # the parent ended before this process asked for the signal
        os._exit(1)
    os.setsid()  # an interrupt of the notebook reaches its launcher, which tells the ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ctrl-C was blocked while ranks were started
    _redirect(output.fileno())
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))  # the parent's do not exist after a fork
    reports = _Reports(channel)
    if environment["RANK"] == "0":
        on_report(reports)
    try:
        result = (pickle.loads(call) if isinstance(call, bytes) else call)()
        start.destroy_process_group()  # a forked process runs no functions of atexit
        reports.flush()
        channel.send(("result", _pickled(result) if environment["RANK"] == "0" else b""))
    except BaseException as error:
        text = traceback.format_exc()
        channel.send(("error", text if not isinstance(error, KeyboardInterrupt) else "KeyboardInterrupt"))
        sys.stderr.flush()
        start.fail(error)  # the others learn why before they learn that it has gone
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()


def _redirect(output: int) -> None:
    """Sends all that this process prints to the descriptor, whatever streams the notebook had."""
    for descriptor in (1, 2):  # the descriptors, too: C++ and children print there
        os.dup2(output, descriptor)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), errors="replace", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="replace", write_through=True)


class _Reports:
    """Sends the newest report, at most ten a second."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._sent = float("-inf")
        self._left: Report | None = None

    def __call__(self, report: Report) -> None:
        self._left = report
        if time.monotonic() - self._sent >= REPORT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        report, self._left = self._left, None
        if report is not None:
            self._sent = time.monotonic()
            self._channel.send(("report", report.step, report.total, dict(report.metrics), report.message))


def _pickled(result: Any) -> bytes:
    """Raises TypeError for what can't be pickled."""
    buffer = io.BytesIO()
    try:
        torch.save(result, buffer)
    except Exception as error:
        raise TypeError(
            f"The function returned a {type(result).__name__}, which can't be sent to the notebook ({error}): return "
            "numbers, tensors or a state_dict. [BG613]"
        ) from None
    return buffer.getvalue()
