"""A place to run the command line in, as a user does, and to see that nothing outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from rig.ports import free_port

from bagua.client import Client
from bagua.client.describe import event_document, job_document
from bagua.proto import common_pb2

MARK = "BAGUA_TEST_MARK"
DEADLINE_S = 240.0
PATIENT_S = 400.0
"""For programs whose ranks import a framework each: half a minute of a core, before anything happens."""
ENDED_S = 60.0
"""For the output of a program that was killed."""
BAGUA = (sys.executable, "-P", "-m", "bagua.cli.main")

SUM = """
    import sys, torch
    import bagua.torch_api as bagua

    bagua.init_process_group()
    found = torch.tensor([float(bagua.get_rank() + 1)])
    bagua.allreduce_inplace(found)
    where = f"rank {bagua.get_rank()} of {bagua.get_world_size()} on node {bagua.get_node_rank()}"
    sys.stdout.write(f"{where} has {found.item():g} {sys.argv[1:]}\\n")
"""
"""A script for all launchers."""


@dataclass(frozen=True)
class Finished:
    """A program that has ended. ``text`` is all it printed, standard error after standard output."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self):
        return self.out + self.err


class Sandbox:
    """Folders of its own, a mark in the environment of all that is started here, and deadlines on every wait."""

    command = BAGUA

    def __init__(self, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        # Short: paths of Unix sockets are limited.
        self.runtime = Path(tempfile.mkdtemp(prefix="bg-", dir="/tmp"))
        self.state = self.runtime / "state"
        self.env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
            MARK: self.mark,
            "BAGUA_STATE_DIR": str(self.state),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }
        self.processes = []
        self.deadline_s = DEADLINE_S

    def script(self, name, text):
        """Writes a script into the folder."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def programs(self, **lines):
        """Makes programs of one line of shell each, the first ones in PATH."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        for name, line in lines.items():
            (folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name).chmod(0o755)
        if str(folder) not in self.env["PATH"]:
            self.env["PATH"] = f"{folder}:{self.env['PATH']}"

    def start(self, *command, env=None, **options):
        """Starts a program in a session of its own."""
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.folder,
            env={**self.env, **(env or {})},
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", subprocess.PIPE),
            **options,
        )
        self.processes.append(process)
        return process

    def run(self, *command, env=None, deadline=None):
        """Runs a program to its end."""
        started = time.monotonic()
        return self.finish(self.start(*command, env=env), started, deadline)

    def finish(self, process, started, deadline=None):
        """Waits for the end of a program. One that does not end fails the test with all it has printed."""
        limit = self.deadline_s if deadline is None else deadline
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            printed = ((error.output or b"") + (error.stderr or b"")).decode(errors="replace")
            pytest.fail(f"{process.args!r} has not ended after {limit:.0f} s. It printed:\n{printed}")
        return Finished(process.returncode, out, err, time.monotonic() - started)

    def bagua(self, *arguments, deadline=None, env=None):
        """Runs ``bagua ARGUMENTS`` to its end."""
        return self.run(*BAGUA, *arguments, deadline=deadline, env=env)

    def marked(self):
        """Every process alive that was started here, directly or not: pid -> command line."""
        needle = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if needle in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def assert_all_gone(self, within):
        """Fails if a process started here is alive after ``within`` seconds."""
        self.wait_until(lambda: not self.marked(), within, lambda: f"still alive: {self.marked()}")

    @staticmethod
    def wait_until(condition, within, explain=lambda: ""):
        """The first true value of ``condition``, looked at every 50 ms; fails the test after ``within`` seconds."""
        deadline = time.monotonic() + within
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {within} s. {explain()}"
            time.sleep(0.05)
        return found

    def assert_no_state_left(self):
        """Fails if a run left its state folder behind."""
        assert not list((self.runtime / "bagua").glob("run-*"))

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.communicate(timeout=ENDED_S)
        shutil.rmtree(self.runtime, ignore_errors=True)


@pytest.fixture(scope="session")
def core():
    """The native core, built: no test's deadline should pay for it."""
    program = "import bagua.csrc.build as builder; builder.build()"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def sandbox_in(folder):
    made = Sandbox(folder)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def sandbox(core, tmp_path):
    with sandbox_in(tmp_path) as made:
        yield made


class Service:
    """A coordinator and node daemons as a service, and the command line that controls it."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        self.coordinator = None
        self.address = f"127.0.0.1:{free_port()}"
        self._token = Path()

    def launch(self, *arguments, prefix=()):
        """Starts one of the service's programs; what it said when it was ready."""
        read_end, write_end = os.pipe()
        log = (self.sandbox.runtime / f"{arguments[0]}-{len(self.sandbox.processes)}.log").open("w")
        with log:
            process = self.sandbox.start(
                *prefix, *BAGUA, *arguments, "--ready-fd", str(write_end), pass_fds=[write_end], stdout=log, stderr=log
            )
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            line = pipe.readline()
        assert line, Path(log.name).read_text()
        ready = json.loads(line)
        assert "error" not in ready, ready
        return process, ready

    def start_coordinator(self, *arguments):
        """Starts the coordinator, again at the address that it had."""
        self.coordinator, ready = self.launch("coordinator", "--listen", self.address, *arguments)
        self.address, self._token = ready["address"], Path(ready["token_file"])

    def start_node(self, name, slots, *options, prefix=()):
        """``prefix``: a command that runs the daemon."""
        where = ("--slots", str(slots), "--coordinator", self.address)
        process, _ = self.launch("daemon", "--name", name, "--node-id", name, *where, *options, prefix=prefix)
        return process

    def call(self, *arguments, deadline=None):
        """``bagua ARGUMENTS``; the coordinator is found through the state folder."""
        return self.sandbox.bagua(*arguments, deadline=deadline)

    def json(self, *arguments):
        """The document that ``bagua ARGUMENTS --output json`` prints."""
        command, sub, *rest = arguments
        finished = self.call(command, sub, "--output", "json", *rest)
        assert finished.code == 0, finished.text
        return json.loads(finished.out)

    def client(self):
        """Of this service, for what the command line is not tested."""
        return Client(self.address, token=self._token.read_text())

    def submit(self, *arguments):
        return str(self.json("job", "submit", *arguments)["job_id"])

    def state(self, job_id):
        """The job's state in the words of the command line. Asked for in this process: the command costs half a second
        of a core."""
        with self.client() as client:
            return common_pb2.JobState.Name(client.get(job_id).state).removeprefix("JOB_STATE_").lower()

    def ranks_that_report(self, job_id):
        """How many ranks of the job have told how their steps divide."""
        with self.client() as client:
            return sum(report.HasField("shares") for report in client.get(job_id).reports)

    def connected_nodes(self):
        """Those that the coordinator hears."""
        with self.client() as client:
            return {node.node_id for node in client.nodes() if node.connected}

    def job(self, job_id):
        """The document that ``bagua job show`` prints, without that command."""
        with self.client() as client:
            job = client.get(job_id)
            return {**job_document(job), "events": [event_document(event) for event in client.events(job_id)]}

    def wait_for_state(self, job_id, states, within):
        """The job's document once it is in one of the states."""
        self.sandbox.wait_until(lambda: self.state(job_id) in states, within, lambda: str(self.job(job_id)))
        return self.job(job_id)


@pytest.fixture
def idle_service(sandbox):
    """Nothing of it has been started."""
    return Service(sandbox)


@pytest.fixture(scope="session")
def shared_service(core, tmp_path_factory):
    """Two nodes, node-a and node-b, with two slots each."""
    with sandbox_in(tmp_path_factory.mktemp("service")) as sandbox:
        made = Service(sandbox)
        made.start_coordinator()
        for name in ("node-a", "node-b"):
            made.start_node(name, 2)
        yield made


@pytest.fixture(scope="module")
def service(shared_service, tmp_path_factory):
    """The service of all tests: a start costs three seconds of a core. No test leaves a job behind. Each file has a
    folder."""
    shared_service.sandbox.folder = tmp_path_factory.mktemp("folder")
    return shared_service
