"""The rolling upgrade of docs/operations.md, between wheels of this tree: one of another version that talks with this
one, and one that does not."""

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.ranks.elastic import PROGRAM

import bagua
from bagua.csrc.wire_version import WIRE_VERSION

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]  # wheels are built

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 600.0
VERSIONS = {
    "now": (bagua.__version__, WIRE_VERSION),
    "talks": ("7.1", WIRE_VERSION),
    "does not": ("7.2", WIRE_VERSION + 1),
}
Install = Callable[[str, str], tuple[str, ...]]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Wheels of this tree. They share the compiled core: numbers are no part of it."""
    source = tmp_path_factory.mktemp("source")
    named = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in named.split("\0")[:-1]:
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    return {name: build(source, version, number) for name, (version, number) in VERSIONS.items()}


def build(source, version, number):
    for file, pattern, text in (
        ("client/__init__.py", r'__version__ = ".*"', f'__version__ = "{version}"'),
        ("csrc/wire_version.py", r"WIRE_VERSION = \d+", f"WIRE_VERSION = {number}"),
    ):
        changed, count = re.subn(pattern, text, (source / file).read_text())
        assert count == 1
        (source / file).write_text(changed)
    out = source.parent / f"wheel-{version}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", out, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture
def install(wheels, sandbox):
    """Installs a wheel on a machine, over the one that was there; the prefix of commands there."""

    def put(machine, name):
        place = sandbox.folder / f"packages-{machine}"
        shutil.rmtree(place, ignore_errors=True)
        zipfile.ZipFile(wheels[name]).extractall(place)
        return ("env", f"PYTHONPATH={place}")

    return put


def start(service, install):
    """A coordinator that was upgraded first, and two nodes that were not."""
    service.coordinator, ready = service.launch(
        "coordinator", "--listen", service.address, prefix=install("coordinator", "does not")
    )
    service.address, service._token = ready["address"], Path(ready["token_file"])
    for name in ("node-a", "node-b"):
        service.start_node(name, 1, prefix=install(name, "now"))


def releases(service):
    with service.client() as client:
        return {node.node_id: (node.version, node.wire_version) for node in client.nodes()}


def seen(service, job_id, holds):
    found = service.sandbox.wait_until(
        lambda: (job := service.job(job_id)) and holds(job) and job, 2 * SOON_S, lambda: str(service.job(job_id))
    )
    return found


def runs_on(job):
    return {rank["node_id"]: rank["pid"] for rank in job["ranks"]} if job["state"] == "running" else {}


def steps(service, job):
    """The ranks add up numbers in the generation that is there now."""
    line = f"generation {job['generation']} "
    logs = [Path(rank["log_path"]) for rank in job["ranks"]]
    service.sandbox.wait_until(lambda: all(line in log.read_text() for log in logs), SOON_S)


def test_a_release_that_talks_takes_over_below_the_ranks(idle_service, sandbox, install):
    """Old ranks take a newcomer with new code."""
    service = idle_service
    start(service, install)
    job_id = service.submit("--nnodes", "1:2", "--respawn", "1", sandbox.script("t.py", PROGRAM))
    steps(service, seen(service, job_id, lambda job: len(runs_on(job)) == 2))
    for number, name in enumerate(("node-a", "node-b"), start=2):
        install(name, "talks")
        done = service.call("node", "upgrade", name)
        assert done.code == 0 and "of version 7.1" in done.out, done.text
        steps(
            service,
            seen(service, job_id, lambda job, number=number: job["generation"] >= number and len(runs_on(job)) == 2),
        )
    assert releases(service) == dict.fromkeys(("node-a", "node-b"), VERSIONS["talks"])
    pids = runs_on(seen(service, job_id, lambda job: len(runs_on(job)) == 2))
    os.kill(pids["node-b"], signal.SIGKILL)
    seen(service, job_id, lambda job: runs_on(job).get("node-b", pids["node-b"]) != pids["node-b"])
    steps(service, seen(service, job_id, lambda job: len(runs_on(job)) == 2 and job["generation"] >= 5))
    (sandbox.folder / "stop").touch()
    assert service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S)["state"] == "succeeded"


def test_a_release_that_does_not_talk_gets_jobs_of_its_own(idle_service, sandbox, install):
    """Whatever is installed meanwhile, the job goes on; words name both releases."""
    service = idle_service
    start(service, install)
    job_id = service.submit("--nnodes", "1:2", "--respawn", "9", sandbox.script("t.py", PROGRAM))
    job = seen(service, job_id, lambda job: len(runs_on(job)) == 2)
    pids = runs_on(job)
    steps(service, job)
    new, old = f"bagua 7.2 (wire version {WIRE_VERSION + 1})", f"(wire version {WIRE_VERSION})"

    install("node-b", "does not")
    refused = service.call("node", "upgrade", "node-b")
    assert refused.code == 1 and new in refused.err and old in refused.err and "drain the node" in refused.err
    assert runs_on(service.job(job_id)) == pids and service.job(job_id)["generation"] == 1

    # A rank is lost before anybody has drained the node: its replacement has the new code.
    os.kill(pids["node-b"], signal.SIGKILL)
    seen(service, job_id, lambda job: any("newcomers are given up" in one["reason"] for one in job["events"]))
    logs = (sandbox.state / "node-node-b" / "jobs" / job_id).glob("rank-*.log")
    told = "".join(path.read_text() for path in logs)
    assert "[BG924]" in told and f"(wire version {WIRE_VERSION + 1})" in told, told
    job = seen(service, job_id, lambda job: set(runs_on(job)) == {"node-a"})
    steps(service, job)

    assert service.call("node", "drain", "node-b").code == 0
    sandbox.wait_until(lambda: service.json("node", "drain", "node-b")["jobs"] == [], SOON_S)
    done = service.call("node", "upgrade", "node-b")
    assert done.code == 0 and "of version 7.2" in done.out, done.text
    assert service.call("node", "undrain", "node-b").code == 0
    assert releases(service) == {"node-a": VERSIONS["now"], "node-b": VERSIONS["does not"]}
    job = seen(service, job_id, lambda job: "can talk with its ranks" in job["growth"])
    assert new in job["growth"] and old in job["growth"] and runs_on(job) == {"node-a": pids["node-a"]}

    waits = service.submit("--nnodes", "2", sandbox.script("two.py", PROGRAM.replace("'stop'", "'end'")))
    service.call("job", "cancel", job_id)
    seen(service, waits, lambda job: "They can't work on one job: node-a: " in job["reason"] and new in job["reason"])
    install("node-a", "does not")
    assert service.call("node", "upgrade", "node-a").code == 0
    steps(service, seen(service, waits, lambda job: len(runs_on(job)) == 2))
    service.call("job", "cancel", waits)
