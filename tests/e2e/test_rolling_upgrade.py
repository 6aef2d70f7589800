"""Version 0.1.0 beside this one: daemons go along with either coordinator, the database does not."""

import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bagua.client import Client
from bagua.proto import common_pb2

# They build a wheel, and the core of that release: a minute of a core.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "0edc39b"
"""The commit that stands for 0.1.0, which was never published."""
BUILD_S = 900.0


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A prefix of commands that makes them those of the last release."""
    folder = tmp_path_factory.mktemp("release")
    archive = subprocess.run(["git", "-C", ROOT, "archive", RELEASE], capture_output=True)
    if archive.returncode:
        pytest.skip(
            f"this copy of the repository has no history with commit {RELEASE}: {archive.stderr.decode()[:200]}"
        )
    source = folder / "source"
    source.mkdir()
    subprocess.run(["tar", "x", "-C", source], input=archive.stdout, check=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        folder,
        source,
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("bagua-0.1.0-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    prefix = ("env", f"PYTHONPATH={folder / 'installed'}")
    said = subprocess.run(
        [*prefix, sys.executable, "-P", "-m", "bagua.cli.main", "--version"], capture_output=True, text=True, timeout=60
    )
    assert said.stdout.strip() == "bagua 0.1.0", said.stdout + said.stderr
    return prefix


def start_coordinator(service, prefix=()):
    service.coordinator, ready = service.launch("coordinator", "--listen", service.address, prefix=prefix)
    service.address, service._token = ready["address"], Path(ready["token_file"])


def client(service):
    return Client(service.address, token=service._token.read_text())


def submit(service, entry, *args, nnodes=2):
    spec = common_pb2.JobSpec(
        name="rolling",
        entry=entry,
        args=args,
        no_python=True,
        nnodes=nnodes,
        nproc_per_node=1,
        placement_timeout_s=300.0,
        stop_grace_s=5.0,
    )
    with client(service) as caller:
        return caller.submit(spec).job_id


def stop(process):
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def versions(service):
    with client(service) as caller:
        return {node.node_id: node.version for node in caller.nodes() if node.connected}


def works(service, nnodes=2):
    """Jobs begin on both nodes, or on one of them, have output, fail with words, and are cancelled."""
    done = submit(service, "/bin/sh", "-c", "echo hello from $RANK", nnodes=nnodes)
    service.wait_for_state(done, ("succeeded",), BUILD_S)
    with client(service) as caller:
        text = b"".join(chunk.data for chunk in caller.logs(done)).decode()
        assert all(f"hello from {rank}" in text for rank in range(nnodes)), text
    bad = submit(service, "/bin/sh", "-c", "echo no luck >&2; exit 7", nnodes=nnodes)
    service.wait_for_state(bad, ("failed",), 120)
    with client(service) as caller:
        found = caller.get(bad)
        assert "7" in found.reason and any("no luck" in rank.error_tail for rank in found.ranks)
    waits = submit(service, "/bin/sleep", "600", nnodes=nnodes)
    service.wait_for_state(waits, ("running",), 120)
    with client(service) as caller:
        caller.cancel(waits)
    service.wait_for_state(waits, ("cancelled",), 60)


def test_the_coordinator_first(idle_service, sandbox, old):
    """The new coordinator refuses the old database. Beside it, as its words and docs/operations.md say, it works."""
    service = idle_service
    start_coordinator(service, old)
    service.start_node("node-a", 2, prefix=old)
    second = service.start_node("node-b", 2, prefix=old)
    sandbox.wait_until(lambda: versions(service) == {"node-a": "0.1.0", "node-b": "0.1.0"}, 60)

    stop(service.coordinator)
    refused = sandbox.bagua("coordinator", "--listen", service.address)
    assert refused.code == 2 and "Traceback" not in refused.err, refused.text
    assert "a development version before 1.0 made: " in refused.err and "move the database away" in refused.err
    (sandbox.state / "coordinator" / "bagua.db").rename(sandbox.folder / "old.db")
    start_coordinator(service)
    sandbox.wait_until(lambda: versions(service) == {"node-a": "0.1.0", "node-b": "0.1.0"}, 60)
    works(service)

    stop(second)
    service.start_node("node-b", 2)
    sandbox.wait_until(lambda: versions(service).get("node-b") not in (None, "0.1.0"), 60)
    waits = submit(service, "/bin/true")  # one of each can't talk
    with client(service) as caller:
        sandbox.wait_until(lambda: "one job: node-a: bagua 0.1.0 (wire version 0); " in caller.get(waits).reason, 60)
        caller.cancel(waits)
    works(service, nnodes=1)
    check = sandbox.bagua("coordinator", "check", "--output", "json")
    assert check.code == 0, check.text


def test_the_daemons_first(idle_service, sandbox, old):
    service = idle_service
    start_coordinator(service, old)
    service.start_node("node-a", 2)
    service.start_node("node-b", 2, prefix=old)
    works(service)


def test_an_old_coordinator_refuses_the_new_schema_with_words(idle_service, sandbox, old):
    service = idle_service
    start_coordinator(service)
    stop(service.coordinator)
    refused = sandbox.run(*old, *sandbox.command, "coordinator", "--listen", "127.0.0.1:0")
    assert refused.code == 2 and "a newer version made it" in refused.err and "Traceback" not in refused.err
