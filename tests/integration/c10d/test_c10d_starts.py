"""Programs that only say "bagua": no import, no daemon, no environment, or the one that torchrun sets."""

import os
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch

SCRIPT = """
    import os
    import socket
    import sys

    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def check(name, world=2):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world and dist.get_backend().startswith(("bagua", "cpu:bagua"))
        assert type(dist.new_group()._get_backend(torch.device("cpu"))).__name__ != "ProcessGroupGloo"
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        sys.stdout.write(f"{name} ended well\\n")
        sys.stdout.flush()

    def work(rank, folder, ports):
        dist.init_process_group("bagua", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        check("file")
        dist.init_process_group("bagua", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2)
        check("tcp")
        store = dist.TCPStore("127.0.0.1", ports[1], 2, rank == 0)
        dist.init_process_group("bagua", store=store, rank=rank, world_size=2)
        check("TCPStore")
        dist.init_process_group("bagua", store=dist.FileStore(f"{folder}/given", 2), rank=rank, world_size=2)
        check("FileStore")
        dist.init_process_group("bagua", store=dist.PrefixStore("mine", store), rank=rank, world_size=2)
        check("PrefixStore")
        dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)  # other processes don't see it
        check("HashStore", world=1)
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[2]))
        dist.init_process_group("cpu:bagua,cuda:gloo")
        check("environment")

    def free_ports(count):
        sockets = [socket.socket() for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]

    if __name__ == "__main__":
        mp.start_processes(work, (sys.argv[1], free_ports(3)), nprocs=2, start_method="fork")
"""
STARTS = ("file", "tcp", "TCPStore", "FileStore", "PrefixStore", "HashStore", "environment")
IMPORT = "" if torch.__version__ >= (2, 5) else "import bagua.c10d\n"  # torch 2.4 looks for no backends by itself


@pytest.mark.full
@pytest.mark.timeout(500)
def test_without_a_daemon(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(IMPORT + textwrap.dedent(SCRIPT))
    with tempfile.TemporaryDirectory(prefix="bg-") as runtime:  # short: Unix sockets lie there
        result = subprocess.run(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, "XDG_RUNTIME_DIR": runtime, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
    counts = {name: result.stdout.splitlines().count(f"{name} ended well") for name in STARTS}
    assert result.returncode == 0 and set(counts.values()) == {2}, (counts, result.stdout)
