"""The data plane through node daemons: two jobs at once, and what a job costs a daemon in memory."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bagua.base.daemon_process import daemon_pid

MIB = 1 << 20

SHARE = """
    import json, os, pathlib, sys
    import torch
    import bagua.torch_api as bagua
    from bagua.base.errors import ServiceError
    from bagua.torch_api.job.daemon import DaemonClient

    bagua.init_process_group()
    folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
    rank, n = bagua.get_rank(), bagua.get_world_size()
    source, result = bagua.empty(1 << 18), bagua.empty(1 << 18)
    source[:] = torch.arange(1 << 18) % 1000 + (1000 if name == "one" else 2000) * rank
    right = (torch.arange(1 << 18) % 1000) * n + (1000 if name == "one" else 2000) * sum(range(n))
    counted = wrong = 0
    while True:
        bagua.allreduce(source, result)
        wrong += not torch.equal(result, right.float())
        flags = torch.tensor([(folder / "go").exists(), (folder / "stop").exists()], dtype=torch.int32)
        bagua.allreduce_inplace(flags, bagua.ReduceOp.MAX)
        counted += int(flags[0])
        if rank == 0 and not (folder / (name + "-began")).exists():
            (folder / (name + "-began")).touch()
        if flags[1]:
            break
    mapped = [line.split(maxsplit=5) for line in open("/proc/self/maps")]
    inodes = {int(parts[4]) for parts in mapped if len(parts) == 6 and parts[5].startswith("/memfd:")}
    for entry in os.scandir("/proc/self/fd"):
        try:
            if os.readlink(entry.path).startswith("/memfd:"):
                inodes.add(os.stat(entry.path).st_ino)
        except FileNotFoundError:
            pass
    try:  # to become this rank of the other job
        DaemonClient(os.environ["BAGUA_DAEMON_SOCKET"], (folder / ("not-" + name)).read_text()).join(rank, 5.0)
        refused = ""
    except ServiceError as error:
        refused = str(error)
    found = {"counted": counted, "wrong": wrong, "inodes": sorted(inodes), "refused": refused}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    end = torch.tensor([0])
    while not end:  # the other job may still knock
        end[0] = (folder / "end").exists()
        bagua.allreduce_inplace(end, bagua.ReduceOp.MAX)
"""


@pytest.mark.full  # integration/data_plane/test_two_jobs.py has two, too
def test_two_jobs_on_the_same_daemons(service):
    """Both get on, at about the same speed; results are right; neither holds memory of the other, nor can a rank of one
    join the other."""
    sandbox = service.sandbox
    script = sandbox.script("share.py", SHARE)
    names = ("one", "two")
    watches = [
        sandbox.start(*command, "--nnodes", "2", "--nproc-per-node", "1", "--name", name, script, sandbox.folder, name)
        for name in names
        for command in [(*sandbox.command, "job", "submit", "--watch")]
    ]
    sandbox.wait_until(lambda: all((sandbox.folder / f"{name}-began").exists() for name in names), 60)
    jobs = {job["name"]: job for job in service.json("job", "list")["jobs"]}
    assert {job["state"] for job in jobs.values()} == {"running"}
    (sandbox.folder / "not-one").write_text(jobs["two"]["job_id"])
    (sandbox.folder / "not-two").write_text(jobs["one"]["job_id"])
    (sandbox.folder / "go").touch()
    time.sleep(2.0)  # what is compared is what both do in it
    (sandbox.folder / "stop").touch()
    files = [sandbox.folder / f"{name}-{rank}.json" for name in names for rank in (0, 1)]
    sandbox.wait_until(lambda: all(path.exists() and path.read_text() for path in files), 60)
    (sandbox.folder / "end").touch()
    for watch in watches:
        done = sandbox.finish(watch, time.monotonic(), deadline=60)
        assert done.code == 0, done.text
    found = [json.loads(path.read_text()) for path in files]
    assert [one["wrong"] for one in found] == [0, 0, 0, 0]
    shares = sorted(one["counted"] for one in found)
    assert 0 < shares[-1] < 4 * shares[0], shares
    for index, one in enumerate(found):
        assert len(one["inodes"]) >= 4  # the job's page, the channel, two tensors
        for other in found[index + 1 :]:
            assert not set(one["inodes"]) & set(other["inodes"])
        assert "has joined already" in one["refused"], one


@dataclass(frozen=True)
class Held:
    """Resources of a daemon. Memory is in bytes, and counts each shared page once."""

    resident: int
    peak: int
    descriptors: int
    threads: int
    mappings: int


def held_by(pid):
    proc = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    maps = (proc / "maps").read_text().splitlines()
    return Held(
        int(fields["VmRSS"].split()[0]) << 10,
        int(fields["VmHWM"].split()[0]) << 10,
        len(os.listdir(proc / "fd")),
        int(fields["Threads"]),
        len(maps),
    )


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
    peaks = [held_by(pid).peak - was.resident for pid, was in zip(daemons, base, strict=True)]
    used = sorted(peaks)[-nodes:]
    print(f"parameters {layers * LAYER_BYTES >> 20} MiB: peaks over the base {[peak >> 20 for peak in used]} MiB")
    assert used[-1] <= 2 * buckets + 64 * MIB, (used, buckets)
    assert used[0] >= buckets, "the model was not in the daemon's memory"

    def back():
        now = [held_by(pid) for pid in daemons]
        return all(
            held.descriptors <= was.descriptors
            and held.threads <= was.threads
            and held.mappings <= was.mappings + 8
            and held.resident <= was.resident + 24 * MIB
            for held, was in zip(now, base, strict=True)
        )

    sandbox.wait_until(back, 30, lambda: str([(held_by(pid), was) for pid, was in zip(daemons, base, strict=True)]))
