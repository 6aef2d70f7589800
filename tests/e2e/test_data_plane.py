"""What a job costs a daemon in memory."""

import os
from pathlib import Path

import pytest

from bagua.base.daemon_process import daemon_pid

MIB = 1 << 20


def held_by(pid):
    """Resources of a daemon. Memory is in bytes, and counts each shared page once."""
    proc = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return {
        "resident": int(fields["VmRSS"].split()[0]) << 10,
        "peak": int(fields["VmHWM"].split()[0]) << 10,
        "descriptors": len(os.listdir(proc / "fd")),
        "threads": int(fields["Threads"]),
        "mappings": len((proc / "maps").read_text().splitlines()),
    }


MORE = {"descriptors": 0, "threads": 0, "mappings": 8, "resident": 24 * MIB}
"""That may stay after a job."""
MODEL = """
    import sys
    import torch
    import bagua.torch_api as bagua
    from bagua.torch_api.algorithms import gradient_allreduce

    torch.set_num_threads(1)
    bagua.init_process_group()
    layers = int(sys.argv[1])
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(layers)))
    # Without an optimizer, which would import torch._dynamo: two seconds of a core.
    model = model.with_bagua([], gradient_allreduce.GradientAllReduceAlgorithm())
    for _ in range(5):
        model.zero_grad()
        model(torch.rand(2, 2048)).sum().backward()
"""
LAYER_BYTES = 2048 * 2048 * 4


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1), (2, 2)], ids=["1 x 2", "2 x 1", "2 x 2"])
def test_memory_of_a_job(service, request, nodes, ranks):
    """A daemon needs for a job at most twice the gradients of its ranks and 64 MiB, over what it needs without one,
    and gives all of it back. With --full the model has 256 MiB of parameters."""
    sandbox = service.sandbox
    layers = 16 if request.config.getoption("--full") else 4
    daemons = [daemon_pid(process.pid) for process in sandbox.processes if "daemon" in process.args]
    script = sandbox.script("model.py", MODEL)
    shape = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks)]

    def train(layers):
        done = service.call("job", "submit", "--watch", *shape, script, str(layers))
        assert done.code == 0, done.text

    train(1)  # what is made once has been made
    base = [held_by(pid) for pid in daemons]
    for pid in daemons:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again
    train(layers)
    buckets = ranks * layers * LAYER_BYTES
    peaks = [held_by(pid)["peak"] - was["resident"] for pid, was in zip(daemons, base, strict=True)]
    used = sorted(peaks)[-nodes:]
    print(f"parameters {layers * LAYER_BYTES >> 20} MiB: peaks over the base {[peak >> 20 for peak in used]} MiB")
    assert used[-1] <= 2 * buckets + 64 * MIB, (used, buckets)
    assert used[0] >= buckets, "the model was not in the daemon's memory"

    def back():
        pairs = [(held_by(pid), was) for pid, was in zip(daemons, base, strict=True)]
        return all(now[what] <= was[what] + more for now, was in pairs for what, more in MORE.items())

    sandbox.wait_until(back, 30, lambda: str([(held_by(pid), was) for pid, was in zip(daemons, base, strict=True)]))
