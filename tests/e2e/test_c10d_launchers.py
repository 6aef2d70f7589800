"""A script with DistributedDataParallel over backend "bagua", started by ``bagua run``, torchrun and
``torch.multiprocessing``, gives what one process gives."""

import sys

import pytest
from rig.limits import SOON_S

TRAIN = """
    import sys

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import bagua.c10d

    def loss_of(model, step, rank):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(4, 8, generator=generator, dtype=torch.float64)
        return (model(inputs) - inputs.sin()).square().mean()

    def steps(model, losses):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            losses(step).backward()
            optimizer.step()

    def main(**how):
        dist.init_process_group("bagua", **how)
        torch.manual_seed(1)
        model, alone = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double() for _ in range(2))
        alone.load_state_dict(model.state_dict())
        wrapped = DistributedDataParallel(model)
        steps(wrapped, lambda step: loss_of(wrapped, step, dist.get_rank()))
        steps(alone, lambda step: (loss_of(alone, step, 0) + loss_of(alone, step, 1)) / 2)
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} has it\\n")
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""

SPAWN = """
    import socket

    import torch.multiprocessing as mp

    import train

    def work(rank, port):
        train.main(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    if __name__ == "__main__":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.start_processes(work, args=(port,), nprocs=2, start_method="fork")  # so torch is imported once
"""

COMMANDS = {
    "bagua run": (sys.executable, "-m", "bagua.cli.main", "run", "--nproc-per-node", "2", "train.py"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"),
    "mp.spawn": (sys.executable, "spawn.py"),
}


# mp.spawn imports torch once. e2e/test_run and test_ephemeral start ranks by the others.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "mp.spawn" else pytest.mark.full) for name in COMMANDS]
)
def test_ddp_started_by(sandbox, name):
    sandbox.script("train.py", TRAIN)
    sandbox.script("spawn.py", SPAWN)
    done = sandbox.run(*COMMANDS[name], env={"PYTHONPATH": str(sandbox.folder)})
    assert done.code == 0, done.text
    for rank in (0, 1):
        assert f"rank {rank} of 2 has it" in done.out, done.text
    sandbox.assert_all_gone(within=SOON_S)
