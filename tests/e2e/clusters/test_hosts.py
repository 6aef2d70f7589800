"""``bagua run --hosts`` through a real sshd on loopback: this machine is both hosts."""

import hashlib
import io
import os
import shlex
import signal
import threading

import pytest
from e2e.clusters.conftest import TELL
from rig import leaks
from rig.docs import pages
from rig.limits import SOON_S

from bagua.hosts import remote


def words(sshd, hosts, *arguments):
    listed = ",".join([f"127.0.0.1:{sshd.port}"] * hosts)
    return ["run", "--hosts", listed, "--ssh", sshd.ssh, *arguments]


def test_two_hosts_are_one_job(sandbox, sshd):
    """The command of the page, with this machine for both hosts."""
    sandbox.script("train.py", TELL)
    [command] = pages.run_by("test_two_hosts_are_one_job", "docs/slurm.md")
    own = words(sshd, 2, "--env", "COLOUR=dark")
    typed = command.replace("bagua run --hosts h1,alice@h2:2222", shlex.join(own))
    done = sandbox.bagua(*shlex.split(typed), "a b")
    assert done.code == 0, done.text
    lines = sorted(line for line in done.out.splitlines() if line.startswith("[rank"))
    assert lines == [f"[rank {r}] rank {r} of 4 dark ['a b']" for r in range(4)]
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


@pytest.mark.full  # e2e/test_run and test_service pass secrets, too
def test_a_secret_stays_in_memory(sandbox, sshd):
    sandbox.script("look.py", leaks.LOOK)
    file, secret = leaks.secret_file(sandbox.folder)
    done = sandbox.bagua(*words(sshd, 2, "--secret", f"HF_TOKEN={file.name}", "--keep-state", "look.py"))
    digest = hashlib.sha256(secret.encode()).hexdigest()
    assert done.code == 3 and done.out.count(digest) == 2 and "seen" not in done.out and secret not in done.text
    assert leaks.files_with(secret, sandbox.folder, sandbox.runtime, sshd.folder) == [file]


def test_a_host_that_lets_nobody_in(sandbox, sshd):
    sandbox.script("tell.py", TELL)
    done = sandbox.bagua("run", "--hosts", f"127.0.0.1:{sshd.port}", "--ssh", "ssh -F /dev/null", "tell.py")
    assert done.code == 1 and "no connection, or no login without a password" in done.err, done.text
    sandbox.assert_all_gone(within=SOON_S)


def test_a_process_that_keeps_the_output_open_is_not_waited_for(monkeypatch):
    """As ssh's master of a shared connection does."""
    monkeypatch.setattr(remote, "LAST_OUTPUT_S", 0.2)
    ended, out = threading.Event(), io.StringIO()
    end = remote.Remote("here", ["sh", "-c", "sleep 300 & echo $!"], out=out, on_end=lambda _: ended.set())
    try:
        assert ended.wait(SOON_S)
        end.end()
        assert end.code == 0
    finally:
        os.kill(int(out.getvalue()), signal.SIGKILL)
        with end.process:  # closes its pipes
            monkeypatch.setattr(remote, "LAST_OUTPUT_S", SOON_S)
            end.wait_output()
