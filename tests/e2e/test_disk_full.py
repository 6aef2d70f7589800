"""A service whose disk is full: a small tmpfs, filled to the last byte."""

import contextlib
import os
import signal
import subprocess

import pytest

WAITER = """
    import pathlib, sys, time
    print("waiting", flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
    print("x" * 1_000_000)
"""


@pytest.fixture
def disk(sandbox):
    """The disk of the state folder."""
    folder = sandbox.runtime / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here, which needs root: {mounted.stderr.strip()}")
    sandbox.env["BAGUA_STATE_DIR"] = str(folder / "state")
    try:
        yield folder
    finally:
        sandbox.close()
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk):
    """A file that leaves no room."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    assert os.statvfs(disk).f_bfree == 0
    return filler


def test_a_full_disk_is_told_in_words_and_nothing_is_lost(disk, sandbox, idle_service):
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 1)
    go = sandbox.folder / "go"
    job_id = service.submit(sandbox.script("wait.py", WAITER), go)
    pid = service.wait_for_state(job_id, ["running"], within=60)["ranks"][0]["pid"]
    # The state is "running" before the rank has printed, and a full disk takes no line.
    sandbox.wait_until(lambda: service.call("job", "logs", job_id).out == "waiting\n", 60)
    filler = fill(disk)

    refused = service.call("job", "submit", "other.py")
    assert refused.code == 1 and "Traceback" not in refused.text
    assert f"The disk of {disk}/state/coordinator is full" in refused.err and "goes on by itself" in refused.err
    go.touch()
    sandbox.wait_until(lambda: pid not in sandbox.marked(), 60)

    assert service.coordinator is not None
    service.coordinator.send_signal(signal.SIGKILL)
    service.coordinator.wait(30)
    again = sandbox.bagua("coordinator", "--listen", service.address)
    assert again.code == 1 and "Traceback" not in again.text, again.text  # it may pass: systemd starts it again
    assert f"The disk of {disk}/state/coordinator is full" in again.err

    filler.unlink()
    service.start_coordinator()
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=60)
    assert (job["state"], job["ranks"][0]["exit_code"]) == ("succeeded", 0), job
    assert service.call("job", "logs", job_id).out.startswith("waiting\n")
