"""Scripts that torchrun starts. The daemon comes and goes."""

import signal
import sys
import time

import pytest
from e2e.conftest import SUM
from rig.limits import SOON_S
from rig.ports import free_port

RESTART = """
    import os, pathlib, sys
    import torch
    import bagua.torch_api as bagua

    def die(when):
        fallen = pathlib.Path(f"fallen-{when}")
        if os.environ["RANK"] == "1" and when in sys.argv and not fallen.exists():
            fallen.touch()
            os._exit(3)

    die("before")  # rank 0 is starting the cluster, or waits for us
    bagua.init_process_group()
    tensor = torch.ones(4)
    bagua.allreduce_inplace(tensor)
    die("after")
    bagua.allreduce_inplace(tensor)
    sys.stdout.write(f"recovered with {int(tensor[0])}\\n")
"""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")


def test_torchrun(sandbox):
    script = sandbox.script("sum_script.py", SUM)
    done = sandbox.run(*TORCHRUN, "2", script)
    assert done.code == 0, done.text
    assert done.out.count(" of 2 on node 0 has 3 ") == 2, done.text
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()


@pytest.mark.full
def test_torchrun_starts_ranks_again(sandbox):
    """Rank 1 dies before it joined, and after a collective; the store outlives the ranks. Each of two agents counts
    restarts for itself."""
    script = sandbox.script("restart.py", RESTART)
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id=again"]
    command = [*TORCHRUN, "1", "--max-restarts", "3", "--monitor-interval", "0.2", *meeting, "--local-addr=127.0.0.1"]
    started = time.monotonic()
    environment = {"BAGUA_TORCH_DISTRIBUTED": "0"}
    agents = [sandbox.start(*command, script, "before", "after", env=environment) for _ in range(2)]
    done = [sandbox.finish(agent, started) for agent in agents]
    text = "\n".join(d.text for d in done)
    assert [d.code for d in done] == [0] * 2, text
    assert sum(d.out.count("recovered with 4") for d in done) == 2, text
    sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full  # integration/node/test_node_jobs.py ends what starts
@pytest.mark.parametrize("service", ["daemon.ephemeral", "daemon.node"])
def test_torchrun_that_is_ended_while_its_ranks_start_leaves_nothing(sandbox, service):
    """At the first sight of the first and of the last process that ranks bring up."""
    script = sandbox.script("sum_script.py", SUM)
    process = sandbox.start(*TORCHRUN, "2", script)
    sandbox.wait_until(lambda: any(service in command for command in sandbox.marked().values()), 60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    sandbox.assert_all_gone(within=SOON_S)
    sandbox.assert_no_state_left()
