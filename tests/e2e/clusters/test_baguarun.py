"""``baguarun`` through a real sshd on loopback, which has keys, settings and a port of its own."""

import sys

import pytest
from e2e.clusters.conftest import TELL
from e2e.conftest import SUM
from rig.docs import pages
from rig.limits import SOON_S
from rig.ports import free_port

BAGUARUN = (sys.executable, "-P", "-m", "bagua.script.baguarun")


def words(sandbox, sshd, hosts, *arguments):
    """A command line. What the sandbox looks for travels along."""
    listed = ",".join([f"127.0.0.1:{sshd.port}"] * hosts)
    variables = [f"-x={name}" for name in ("BAGUA_TEST_MARK", "XDG_RUNTIME_DIR", "BAGUA_STATE_DIR")]
    return [*BAGUARUN, "--host_list", listed, "--ssh", sshd.ssh, *variables, *arguments]


def test_a_host_runs_the_script(sandbox, sshd):
    sandbox.script("tell.py", TELL)
    order = words(sandbox, sshd, 1, "-x", "COLOUR=dark blue; exit", "--nproc_per_node=2", "tell.py", "--name", "a b")
    done = sandbox.run(*order)
    assert done.code == 0, done.text
    lines = sorted(line for line in done.out.splitlines() if line.startswith("[rank"))
    assert lines == [f"[rank {r}] rank {r} of 2 dark blue; exit ['--name', 'a b']" for r in (0, 1)]
    sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full  # four processes import torch
def test_two_hosts_are_one_job(sandbox, sshd):
    """By the command of the page, with this machine for both hosts."""
    sandbox.script("main.py", SUM)
    [command] = pages.run_by("test_two_hosts_are_one_job", "docs/launchers.md")
    program, list_option, hosts, *rest = command.split()
    assert (program, list_option, hosts) == ("baguarun", "--host_list", "h1,h2:2222")
    smaller = {"--nproc_per_node=8": "--nproc_per_node=1", "--master_port=1234": f"--master_port={free_port()}"}
    done = sandbox.run(*words(sandbox, sshd, 2, *(smaller.get(word, word) for word in rest)))
    assert done.code == 0, done.text
    assert all(f"rank {rank} of 2 on node {rank} has 3 " in done.out for rank in (0, 1)), done.text
    sandbox.assert_all_gone(within=SOON_S)
