"""A job of two nodes from nothing: by hand, or as a BaguaJob on Kubernetes. Coordinator, daemons and ranks are real."""

import signal
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from bagua.base.child_service import ServiceProcess
from bagua.proto import common_pb2

from .calls import PAUSE_S
from .report import Row, bar
from .way import Coordinator

NODES = 2
IMAGE = "bagua:bench"  # the kubelet of the tests runs this Python
POLL_S = "5"  # the operator's default; the tests' own is shorter
PROGRAM = 'touch "$0/began-$RANK"; until [ -e "$0/stop" ]; do sleep 0.02; done; touch "$0/ended-$RANK"'  # $0: a folder
Start = Callable[[str, Path], AbstractContextManager[Callable[[], bool]]]
"""(name, folder of the program) -> within the context the job runs; the value asks whether it has succeeded."""


def start(options, folder):
    """How long until all ranks run, and until their end is seen."""
    way = options.way
    with ExitStack() as stack:
        begin = stack.enter_context(on_kubernetes(way) if way.operator else by_hand(way))
        starts, ends = [], []
        with bar("jobs from nothing", options.times) as show:
            for number in range(options.times):
                marks = folder / f"marks-{number}"
                marks.mkdir()
                asked = time.time()
                with begin(f"bench-{number}", marks) as succeeded:
                    starts.append(last_mark(marks, "began", options.limit_s) - asked)
                    (marks / "stop").touch()
                    ended = last_mark(marks, "ended", options.limit_s)
                    until(succeeded, options.limit_s, "the job's end is not seen")
                    ends.append(max(0.0, time.time() - ended))
                show(number + 1)
    what = f"a job of {NODES} nodes from nothing, until its ranks run"
    yield Row(what, statistics.median(starts), "s", "", f"median of {len(starts)}, longest {max(starts):.2f} s")
    note = f"median of {len(ends)}, longest {max(ends):.2f} s"
    yield Row("  from the ranks' end until it is seen", statistics.median(ends), "s", "", note, least=PAUSE_S)


def until(condition, limit_s, words):
    """Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{words} after {limit_s:g} s")
        time.sleep(PAUSE_S)


def last_mark(folder, kind, limit_s):
    """When the last rank made its mark, in seconds since the epoch."""
    marks = [folder / f"{kind}-{rank}" for rank in range(NODES)]
    until(lambda: all(mark.exists() for mark in marks), limit_s, f"not all ranks have {kind}")
    return max(mark.stat().st_mtime for mark in marks)


@contextmanager
def by_hand(way):
    """A coordinator and daemons as processes, and a call of the client."""

    @contextmanager
    def begin(name, marks):
        with Coordinator(marks / "state", way=way) as coordinator, ExitStack() as stack:
            for number in range(NODES):
                stack.enter_context(daemon(coordinator, marks / f"node-{number}"))
            client = stack.enter_context(coordinator.client())
            job = client.submit(
                common_pb2.JobSpec(
                    name=name,
                    entry="/bin/sh",
                    no_python=True,
                    args=["-c", PROGRAM, str(marks)],
                    nnodes=NODES,
                    nproc_per_node=1,
                    workdir="/",
                    placement_timeout_s=120.0,
                    stop_grace_s=5.0,
                )
            )
            yield lambda: client.get(job.job_id).state == common_pb2.JOB_STATE_SUCCEEDED

    yield begin


@contextmanager
def daemon(coordinator, state):
    """A real node daemon."""
    options = ["--name", state.name, "--slots", "1", "--state-dir", str(state), "--coordinator", coordinator.address]
    options += ["--token-file", str(coordinator.node_token_file)]
    options += ["--tls", coordinator.tls_folder] if coordinator.tls_folder else []
    state.mkdir()
    service = ServiceProcess("daemon", "bagua.daemon.node", options, state / "log")
    try:
        yield
    finally:
        service.signal_group(signal.SIGTERM)
        service.wait(time.monotonic() + 30)


@contextmanager
def on_kubernetes(way):
    """The API server, controllers and kubelet of the tests, and the operator, which is there before jobs come. Its
    coordinators always have TLS and a token."""
    from rig.clusters import kubelet, kubernetes
    from rig.clusters.operators import JOBS, Operated

    if reason := kubernetes.missing() or kubelet.missing():
        raise SystemExit(f"--operator: {reason}")
    cluster = Operated()

    @contextmanager
    def begin(name, marks):
        run = {"program": "/bin/sh", "args": ["-c", PROGRAM, str(marks)]}
        cluster.submit(
            name,
            image=IMAGE,
            replicas=NODES,
            run=run,
            runPolicy={"restartPolicy": "Never"},
            coordinator={"ephemeral": True},
        )
        try:
            yield lambda: cluster.status(name).get("phase") == "Succeeded"
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{cluster.explain()}") from error
        finally:
            cluster.api.delete(f"{JOBS}/{name}")

    try:
        cluster.start()
        cluster.start_operator(BAGUA_OPERATOR_POLL_S=POLL_S)
        yield begin
    finally:
        cluster.close()
