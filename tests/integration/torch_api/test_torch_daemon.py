"""The client library on whole daemons: those that it starts by itself, and those of ``bagua run``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import bagua.torch_api as bagua
    from bagua.torch_api.job import meeting
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    def train():
        rank = bagua.get_rank()
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.with_bagua([optimizer], GradientAllReduceAlgorithm())
        for step in range(5):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(rank + step))).sum().backward()
            optimizer.step()
            bagua.report(step=step + 1, total=5)
        mine = model.weight.detach().reshape(-1)
        everyone = torch.zeros(bagua.get_world_size(), 16)
        bagua.allgather(mine, everyone)
        assert (everyone == everyone[0]).all()
        where = f"{bagua.get_local_rank()}/{bagua.get_local_size()} node {bagua.get_node_rank()}"
        sys.stdout.write(f"trained {rank}/{bagua.get_world_size()} {where}\\n")
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

    def by_store(rank, world, port, file):
        store = dist.FileStore(file, world)
        bagua.init_process_group(store, rank, world, world)
        train()
        bagua.destroy_process_group()
        # Once more in the same processes: another daemon.
        bagua.init_process_group(dist.FileStore(file + "2", world), rank, world, world)
        train()

    if __name__ == "__main__":
        how, extra = sys.argv[1:]
        if how == "here":
            bagua.init_process_group()
            train()
        else:
            port = bagua.env.find_free_network_port()
            # Forked: a rank that imports torch by itself costs two seconds of a core. e2e/test_ephemeral spawns.
            mp.start_processes(globals()[how], args=(2, port, extra), nprocs=2, start_method="fork")
"""


class Sandbox:
    """Runs programs with folders of their own and finds what they left behind."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        """``runtime``: where Unix sockets lie."""
        self.script = folder / "script.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.runtime = runtime
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "BAGUA_STATE_DIR": str(folder / "state"),
        }

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=self.environment, capture_output=True, text=True, timeout=150
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        assert check or done.returncode != 0
        return done.stdout + done.stderr

    def left(self) -> list[str]:
        """Command lines of living processes that have our environment."""
        found = []
        for process in psutil.process_iter(["pid"]):
            try:
                if process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def check_nothing_left(self) -> None:
        deadline = time.monotonic() + 15
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert self.left() == []


@pytest.fixture
def sandbox(tmp_path: Path, short_folder: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path, short_folder)
    yield made
    made.check_nothing_left()


@pytest.mark.full  # e2e/test_ephemeral: ranks of torchrun start a daemon, too
@pytest.mark.parametrize("torch_too", ["", "before", "after"])
def test_spawned_with_the_environment_alone(sandbox: Sandbox, torch_too: str) -> None:
    """LOCAL_WORLD_SIZE is absent; torch.distributed may be used on the same port, before or, without ours, after."""
    if torch_too == "after":
        sandbox.environment["BAGUA_TORCH_DISTRIBUTED"] = "0"
    output = sandbox.run(str(sandbox.script), "by_environment", torch_too)
    assert "trained 0/2 0/2 node 0" in output and "trained 1/2 1/2 node 0" in output


@pytest.mark.full  # e2e/test_ephemeral: ranks of torchrun start a daemon, too
def test_spawned_with_a_store(sandbox: Sandbox, tmp_path: Path) -> None:
    output = sandbox.run(str(sandbox.script), "by_store", str(tmp_path / "store"))
    assert output.count("trained 1/2 1/2 node 0") == 2


@pytest.mark.full  # e2e/test_ephemeral: ranks of torchrun start a daemon, too
def test_a_daemon_that_cannot_start_is_an_error_on_every_rank(sandbox: Sandbox) -> None:
    blocked = sandbox.runtime / "bagua"
    blocked.write_text("not a folder")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    output = sandbox.run(*torchrun, str(sandbox.script), "here", "", check=False)
    # torchrun may stop one rank before it has told of its error: the other one's says as much.
    assert "ServiceError: " in output and f"The folder {blocked} can't be written" in output


@pytest.mark.full  # e2e/test_equality trains ranks of bagua run, too
def test_bagua_run(sandbox: Sandbox) -> None:
    run = ["-m", "bagua.cli.main", "run", "--nnodes", "2", "--nproc-per-node", "2"]
    output = sandbox.run(*run, str(sandbox.script), "here", "")
    for rank in range(4):
        assert f"trained {rank}/4 {rank % 2}/2 node {rank // 2}" in output


def test_a_rank_that_leaves_its_job_ends_well(sandbox: Sandbox, tmp_path: Path) -> None:
    """Also while a thread still frees Gloo's group: the end of the interpreter would abort the process in it."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import bagua.torch_api as bagua\n"
        "from bagua.torch_api.job.session import current\n"
        "bagua.init_process_group()\n"
        "current().companion.leave()  # as by a planned change\n"
        "current().dismissed = True\n"
    )
    sandbox.run("-m", "bagua.cli.main", "run", "--elastic", "--nproc-per-node", "1", str(script))
