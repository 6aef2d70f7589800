"""``bagua run --checkpoint-dir``: all processes of a job are killed, and the same command goes on where it was."""

import os
import signal
import sys
from contextlib import suppress

import pytest

BAGUA = (sys.executable, "-P", "-m", "bagua.cli.main")

TRAIN = """
    import signal, sys
    import torch
    import bagua.torch_api as bagua

    bagua.init_process_group()
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.arange(80.0).view(-1, 1))
    sampler = bagua.contrib.ElasticSampler(data, batch_size=1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    model = model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(every=5)
    start = checkpointer.resume()
    print("begins with", start.step if start else 0, flush=True)
    used = open(f"used-{sys.argv[1]}-{bagua.get_rank()}", "w")
    for epoch in sampler.epochs(1):
        for (samples,) in sampler.loader():
            optimizer.zero_grad()
            model(samples).sum().backward()
            optimizer.step()
            checkpointer.step()
            print(checkpointer.steps, int(samples), file=used, flush=True)
            if checkpointer.steps == 18 and sys.argv[1] == "stop":
                checkpointer.wait()
                while True:
                    signal.pause()
"""


def used(folder, run, before=10**9):
    rows = [line.split() for rank in (0, 1) for line in (folder / f"used-{run}-{rank}").read_text().splitlines()]
    return [int(sample) for step, sample in rows if int(step) <= before]


@pytest.mark.full  # test_torch_checkpointer.py resumes with other numbers of ranks
def test_the_whole_job_is_killed_and_started_again(sandbox):
    script = sandbox.script("train.py", TRAIN)
    folder = sandbox.folder / "checkpoints"
    command = ["run", "--nnodes", "2", "--checkpoint-dir", "checkpoints", script]
    sandbox.start(*BAGUA, *command, "stop")
    sandbox.wait_until(lambda: (folder / "step_0000000015").is_dir(), 90)
    while found := sandbox.marked():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    sandbox.processes[0].wait()
    begun = max(int(path.name[5:]) for path in folder.glob("step_*"))
    assert begun >= 15
    again = sandbox.bagua(*command, "go")
    assert again.code == 0, again.text
    assert again.out.count(f"begins with {begun}\n") == 2
    assert sorted(used(sandbox.folder, "stop", begun) + used(sandbox.folder, "go")) == list(range(80))
