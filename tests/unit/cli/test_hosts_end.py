"""A node of Slurm whose daemon does not start tells whoever waits for it: a step of srun goes on without one."""

import time

import pytest
from rig.limits import SOON_S

from bagua.cli.cluster.slurm import SrunWay, sweep
from bagua.hosts.end import Order

SRUN = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do shift; done
exec 3<&0
SLURMD_NODENAME=n2 "$@" <&3 &
echo "srun: error: n2: task 1: Exited with exit code 1"
exec cat <&3 >/dev/null
"""
"""As srun with --kill-on-bad-exit=0: one task fails, and the step goes on until its input ends."""


@pytest.fixture
def srun(tmp_path):
    path = tmp_path / "srun"
    path.write_text(SRUN)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("files", "words"),
    [({}, "It ended with code 1. Last words of all: "), ({"token": "t"}, "is a link: somebody else made it.")],
    ids=["the daemon", "before it"],
)
def test_a_node_without_a_daemon_is_named(files, words, srun, tmp_path, monkeypatch):
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    (runtime / "bagua").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    way = SrunWay("7", 2, "127.0.0.1", tmp_path / "shared", srun)
    (step,) = way.start(Order("bagua.no_such_daemon", [], files=files), tmp_path)
    try:
        give_up = time.monotonic() + SOON_S
        while not (told := way.failure()):
            assert time.monotonic() < give_up
            time.sleep(0.05)
    finally:
        step.signal_group(15)
        step.wait(time.monotonic() + SOON_S)
        way.close()
    assert told.startswith("The node daemon of n2 failed: ") and words in told and "srun:" not in told
    assert not list((tmp_path / "shared").iterdir())


def test_folders_of_jobs_that_slurm_has_no_more_go(tmp_path):
    """With the token and the certificates in them; `scancel` kills who would remove them."""
    shared = tmp_path / "shared"
    for name in ("7-abc", "8-def", "70-ghi", "notes"):
        (shared / name).mkdir(parents=True)
        (shared / name / "order").touch()
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\nexit 1\n")
    squeue.chmod(0o755)
    for absent in (str(squeue), str(tmp_path / "absent")):
        sweep(shared, absent)
        assert len(list(shared.iterdir())) == 4, "Slurm did not answer"
    squeue.write_text("#!/bin/sh\necho 8\necho 9\n")
    sweep(shared, str(squeue))
    assert {path.name for path in shared.iterdir()} == {"8-def", "notes"}
