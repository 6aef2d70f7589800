"""Programs that only say "bagua": no import, no daemon, no environment, or the one that torchrun sets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import os
    import sys

    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    import bagua.c10d  # noqa: F401 - before torch 2.5 nothing else would register it

    def check():
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2 and dist.get_backend().startswith(("bagua", "cpu:bagua"))
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()

    def work(rank, folder, port):
        dist.init_process_group("bagua", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        check()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("cpu:bagua,cuda:gloo")
        check()
        sys.stdout.write("ended well\\n")
        sys.stdout.flush()

    if __name__ == "__main__":
        from bagua.torch_api.env import find_free_network_port

        mp.start_processes(work, (sys.argv[1], find_free_network_port()), nprocs=2, start_method="fork")
"""


@pytest.mark.full
@pytest.mark.timeout(500)
def test_without_a_daemon(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with tempfile.TemporaryDirectory(prefix="bg-") as runtime:  # short: Unix sockets lie there
        result = subprocess.run(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, "XDG_RUNTIME_DIR": runtime, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
    assert result.returncode == 0 and result.stdout.count("ended well") == 2, result.stdout
