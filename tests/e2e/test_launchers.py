"""The original's launchers as their READMEs call them. unit/cli/test_launchers.py has the options."""

import socket
import sys
import time

import pytest
from e2e.conftest import SUM
from rig.docs import pages
from rig.limits import SOON_S

LAUNCH = (sys.executable, "-m", "bagua.distributed.launch")
RUN = (sys.executable, "-m", "bagua.distributed.run")

# Without torch, whose import costs two seconds of a core.
TELL = """
    import os, sys
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["BAGUA_AUTOTUNE_MAX_SAMPLES"], sys.argv[1:])
"""

# Fails the first time.
AGAIN = """
    import os, sys
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", count, "of at most", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    sys.exit(count == "0")
"""


def test_launch_on_one_host(sandbox):
    sandbox.script("main.py", TELL)
    [command] = pages.run_by("test_launch_on_one_host", "docs/launchers.md")
    python, *words = command.replace("--nproc_per_node=8", "--nproc_per_node=2").split()
    at = words.index("main.py")
    options = ("--set_additional_flag", "--autotune_max_samples=7", "--logdir", "logs")
    done = sandbox.run(sys.executable, *words[:at], *options, *words[at:])
    assert python == "python"
    assert done.code == 0, done.text
    told = [f"{rank} 2 7 ['--local_rank={rank}', '--algorithm', 'gradient_allreduce']" for rank in (0, 1)]
    assert sorted(done.out.splitlines()) == [f"[rank {rank}] {line}" for rank, line in enumerate(told)]
    assert [(sandbox.folder / "logs" / f"rank-{rank}.log").read_text().strip() for rank in (0, 1)] == told
    sandbox.assert_all_gone(within=SOON_S)


def test_run_starts_a_failed_job_again(sandbox):
    sandbox.script("main.py", AGAIN)
    done = sandbox.run(*RUN, "--standalone", "--nproc_per_node=1", "--max_restarts=2", "main.py")
    assert done.code == 0, done.text
    assert done.out == "attempt 0 of at most 2\nattempt 1 of at most 2\n"
    assert "The job starts again; restarts left: 2." in done.err
    sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full  # five processes import torch
@pytest.mark.parametrize(
    "words",
    [(LAUNCH, "--nnodes=2", "--node_rank={}", "--master_addr=127.0.0.1", "--master_port={port}"), "docs/launchers.md"],
)
def test_two_nodes(sandbox, words):
    """As on two machines: the same command on each, that of the page, too. Both have one network address here, and one
    rank each."""
    sandbox.script("main.py", SUM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if isinstance(words, str):
        [typed] = pages.run_by("test_two_nodes", words)
        typed = typed.replace("h1:29400", "127.0.0.1:{port}").replace("=1:4", "=1:2").removesuffix(" main.py")
        python, *options = typed.replace("--nproc_per_node=8", "--nproc_per_node=1").split()
        assert python == "python"
        words = ((sys.executable,), *options)
    command, *options = (*words, "--nproc_per_node=1")
    nodes = [
        sandbox.start(*command, *(one.format(node, port=port) for one in options), "main.py", "-a") for node in (0, 1)
    ]
    done = [sandbox.finish(node, time.monotonic()) for node in nodes]
    assert [one.code for one in done] == [0, 0], "".join(one.text for one in done)
    out = "".join(one.out for one in done)
    assert all(f"rank {rank} of 2 on node {rank} has 3 ['-a']" in out for rank in (0, 1)), out
    sandbox.assert_all_gone(within=SOON_S)
