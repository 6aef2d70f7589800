"""Programs that never heard of the daemon: started by torch.multiprocessing, many groups made and dropped in one
process, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
    import gc
    import os
    import sys

    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.utils.data import DataLoader, TensorDataset

    import bagua.torch_api as bagua
    from bagua.torch_api.communication import new_group
    from bagua.torch_api.job.session import current

    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def groups(rank, number):
        for i in range(number):
            group = new_group([None, [0, 1], [rank]][i % 3])
            tensor = torch.ones(10)
            bagua.allreduce_inplace(tensor, comm=group.get_global_communicator())
            assert tensor[0] == len(group.ranks)
            bagua.barrier(group.get_intra_node_communicator())

    def life(rank, number):
        bagua.init_process_group()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        groups(rank, 6)
        before = held()
        groups(rank, number)
        assert held() == before, (held(), before)
        for (x,) in DataLoader(TensorDataset(torch.ones(4, 1)), num_workers=1, multiprocessing_context="fork"):
            bagua.allreduce_inplace(x)
        bagua.destroy_process_group()
        assert not dist.is_initialized()
        return held()

    def work(rank, port):
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            BAGUA_SERVICE_PORT=str(port),
        )
        life(rank, 50)
        second, third = life(rank, 10), life(rank, 10)
        assert all(now <= then for now, then in zip(third, second)), (second, third)  # some go a moment later
        sys.stdout.write("ended well\\n")
        sys.stdout.flush()

    if __name__ == "__main__":
        arguments = (bagua.env.find_free_network_port(),)
        mp.start_processes(work, args=arguments, nprocs=2, start_method="fork")  # so torch is imported once
"""


def processes_with(folder: str) -> list[str]:
    """Command lines of living processes that have this folder in their environment."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            if process.environ().get("XDG_RUNTIME_DIR") == folder:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.full  # tests/soak makes groups, test_torch_daemon.py spawns ranks
def test_many_groups_and_lives_in_one_process_leave_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    # Short paths: Unix sockets lie there, those of torch's DataLoader, too.
    with tempfile.TemporaryDirectory(prefix="bg-") as runtime, tempfile.TemporaryDirectory(prefix="bg-") as temporary:
        environment = {**os.environ, "XDG_RUNTIME_DIR": runtime, "TMPDIR": temporary}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0 and done.stdout.count("ended well") == 2, done.stdout + done.stderr
        deadline = time.monotonic() + 30
        while processes_with(runtime) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert processes_with(runtime) == []
        left = [str(path.relative_to(runtime)) for path in Path(runtime).rglob("*") if not path.is_dir()]
        assert left == [] and os.listdir(temporary) == [], left
