"""The client library on whole daemons: those that it starts by itself, and those of ``bagua run``."""

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

SCRIPT = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import bagua.torch_api as bagua
    from bagua.torch_api.job import meeting

    def train():
        tensor = torch.full((1000,), float(bagua.get_rank() + 1))
        bagua.allreduce_inplace(tensor)
        where = f"{bagua.get_local_rank()}/{bagua.get_local_size()} node {bagua.get_node_rank()}"
        sys.stdout.write(f"sum {int(tensor[0])} {bagua.get_rank()}/{bagua.get_world_size()} {where}\\n")
        sys.stdout.flush()

    def by_environment(rank, world, port, torch_too):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if torch_too == "before":
            dist.init_process_group("gloo")
        if rank == 0:  # which takes its time to let go of MASTER_PORT: nobody else goes on before
            meeting.Meeting.__del__ = lambda _: time.sleep(1.0)
        bagua.init_process_group()
        assert dist.is_initialized() == (torch_too != "after")
        if torch_too == "after":
            dist.init_process_group("gloo")
        train()
        if torch_too:
            dist.barrier()
            dist.destroy_process_group()

    if __name__ == "__main__":
        if sys.argv[1] == "here":
            bagua.init_process_group()
        else:
            port = bagua.env.find_free_network_port()
            # Forked: a rank that imports torch by itself costs two seconds of a core. e2e/test_ephemeral spawns.
            mp.start_processes(by_environment, args=(2, port, sys.argv[2]), nprocs=2, start_method="fork")
"""
LEAVES = """
    import bagua.torch_api as bagua
    from bagua.torch_api.job.session import current
    bagua.init_process_group()
    current().companion.leave()  # as by a planned change
    current().dismissed = True
"""


class Sandbox:
    """Runs programs with folders of their own and finds what they left behind."""

    def __init__(self, folder, runtime):
        """``runtime``: where Unix sockets lie."""
        self.folder, self.runtime = folder, runtime
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "BAGUA_STATE_DIR": str(folder / "state")}

    def run(self, script, *arguments, before=(), code=(0,)):
        """``before``: of the script's file on the command line."""
        file = self.folder / "script.py"
        file.write_text(textwrap.dedent(script))
        command = [sys.executable, *before, str(file), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=150)
        assert done.returncode in code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def left(self):
        """Command lines of living processes that have our environment."""
        found = []
        for process in psutil.process_iter(["pid"]):
            try:
                if process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found


@pytest.fixture
def sandbox(tmp_path, short_folder):
    made = Sandbox(tmp_path, short_folder)
    yield made
    deadline = time.monotonic() + 15
    while made.left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert made.left() == []


@pytest.mark.full  # e2e/test_ephemeral: ranks of torchrun start a daemon, too
@pytest.mark.parametrize("torch_too", ["", "before", "after"])
def test_spawned_with_the_environment_alone(sandbox, torch_too):
    """LOCAL_WORLD_SIZE is absent; torch.distributed may be used on the same port, before or, without ours, after."""
    if torch_too == "after":
        sandbox.environment["BAGUA_TORCH_DISTRIBUTED"] = "0"
    output = sandbox.run(SCRIPT, "by_environment", torch_too)
    assert "sum 3 0/2 0/2 node 0" in output and "sum 3 1/2 1/2 node 0" in output


@pytest.mark.full  # e2e/test_ephemeral: ranks of torchrun start a daemon, too
def test_a_daemon_that_cannot_start_is_an_error_on_every_rank(sandbox):
    blocked = sandbox.runtime / "bagua"
    blocked.write_text("not a folder")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    output = sandbox.run(SCRIPT, "here", before=torchrun, code=range(1, 256))
    # torchrun may stop one rank before it has told of its error: the other one's says as much.
    assert "ServiceError: " in output and f"The folder {blocked} can't be written" in output


def test_a_rank_that_leaves_its_job_ends_well(sandbox):
    """Also while a thread still frees Gloo's group: the end of the interpreter would abort the process in it."""
    sandbox.run(LEAVES, before=["-m", "bagua.cli.main", "run", "--elastic", "--nproc-per-node", "1"])
