"""``bagua.notebook_launcher``, called in processes that have imported torch and used nothing of it yet."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from rig.docs import pages
from rig.ranks import forking
from torch import distributed

import bagua.torch_api as bagua
from bagua import csrc
from bagua.base.errors import BaguaError
from bagua.torch_api.notebook import cell, launcher

DEADLINE_S = 240.0


@pytest.fixture
def in_a_process(tmp_path):
    """``in_a_process(function)``: what it returned in a process of its own, and what that printed."""

    def run(function, **arguments):
        result, log = tmp_path / "result.pt", tmp_path / "log"
        argv = [forking.RANK_MAIN, function.__code__.co_filename, function.__name__, result, json.dumps(arguments)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment["XDG_RUNTIME_DIR"] = str(tmp_path)
        with log.open("wb") as output:
            process = forking.server().fork([str(word) for word in argv], environment, output.fileno())
        if process is None:
            pytest.skip("this version of torch starts threads when it is imported: no process can be forked from it")
        try:
            assert process.wait(DEADLINE_S) == 0, log.read_text()
        finally:
            process.kill()
        return torch.load(result, weights_only=False), log.read_text()

    return run


def train(steps):
    bagua.init_process_group()
    torch.manual_seed(bagua.get_rank())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = model.with_bagua([optimizer])
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((4, 2), 1.0 + bagua.get_rank())).pow(2).mean()
        loss.backward()
        optimizer.step()
        bagua.report(step + 1, steps, {"loss": loss})
    print(f"rank {bagua.get_rank()} of {bagua.get_world_size()}")
    return {"weight": model.weight.detach(), "loss": loss.item(), "rank": bagua.get_rank()}


def launches():
    shown = []
    cell.Cell.progress = lambda _, *report: shown.append(report)
    names = {"train": train}
    exec(pages.part_by("test_ranks_train_and_rank_0_speaks", "docs/frameworks.md"), names)
    return names["weights"], shown


def test_ranks_train_and_rank_0_speaks(in_a_process):
    (result, shown), printed = in_a_process(launches)
    assert printed == "rank 0 of 2\n"
    assert result["rank"] == 0 and result["weight"].shape == (1, 2)
    step, total, metrics, message = shown[-1]
    assert (step, total, message) == (3, 3, "") and metrics["loss"] == pytest.approx(result["loss"])


KEPT = []
"""Models outlive their process group. The last reference to Gloo's group must not go with one: its end joins a thread
that may be waiting for the GIL, which is held then."""


def train_with_ddp(backend):
    """A loss for each step."""
    distributed.init_process_group(backend)
    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    KEPT.append(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((4, 2), 1.0 + distributed.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    distributed.destroy_process_group()
    return losses


def launches_ddp():
    """From a process that has imported all of it, the C++ backend too."""
    csrc.load_c10d()
    return [bagua.notebook_launcher(train_with_ddp, (backend,)) for backend in ("gloo", "bagua")]


def test_the_backend_of_torch_works_in_forks(in_a_process):
    """The losses are those of Gloo, bit by bit."""
    theirs, ours = in_a_process(launches_ddp)[0]
    assert ours == theirs and len(set(ours)) == 3


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("this is the reason")
    time.sleep(DEADLINE_S)  # the launch ends it


def fails_by_signal():
    os.kill(os.getpid(), signal.SIGKILL)


def failures():
    launcher.GRACE_S = 0.2
    found = []
    for function in (fails_on_rank_1, fails_by_signal, returns_a_lock):
        with pytest.raises(BaguaError) as error:
            bagua.notebook_launcher(function)
        found.append(str(error.value))
    return found


def returns_a_lock():
    return time  # a module, which can't be pickled


def test_a_rank_that_fails_ends_all_with_its_traceback(in_a_process):
    (raised, killed, unpickled), printed = in_a_process(failures)
    assert raised.startswith("Rank 1 failed") and raised.splitlines()[-1] == "ValueError: this is the reason [BG613]"
    assert "was ended by SIGKILL" in killed
    assert "returned a module, which can't be sent" in unpickled
    assert printed == ""


def interrupts():
    if os.environ["RANK"] == "0":
        print(f"pid {os.getpid()}", flush=True)
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(DEADLINE_S)


def is_interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bagua.notebook_launcher(interrupts)
    return time.monotonic() - before


def test_an_interrupt_ends_all_ranks(in_a_process):
    seconds, printed = in_a_process(is_interrupted)
    assert seconds < DEADLINE_S
    found = re.search(r"^pid (\d+)$", printed, re.MULTILINE)
    assert found is not None, printed
    assert not Path(f"/proc/{found[1]}").exists()


def is_a_world_of_one():
    before = launcher._can_fork()
    bagua.init_process_group()
    total = torch.tensor([3.0])
    bagua.allreduce_inplace(total)
    found = {"total": total.item(), "ranks": bagua.get_world_size(), "could fork": (before, launcher._can_fork())}
    bagua.destroy_process_group()
    return found


def test_a_plain_process_is_a_world_of_one(in_a_process):
    """It then was a rank, with gRPC's threads: no fork of it can be another."""
    found, _ = in_a_process(is_a_world_of_one)
    assert found == {"total": 3.0, "ranks": 1, "could fork": (True, False)}


def spawns():
    bagua.init_process_group()
    bagua.destroy_process_group()
    scale = torch.tensor(3.0)

    def from_a_cell(value):
        """Can't be imported anywhere."""
        import bagua.torch_api as bagua

        bagua.init_process_group()
        total = scale * value * (bagua.get_rank() + 1)
        bagua.allreduce_inplace(total)
        return float(total)

    return bagua.notebook_launcher(from_a_cell, (2.0,))


@pytest.mark.full
def test_fresh_processes_where_a_fork_can_not_work(in_a_process):
    pytest.importorskip("cloudpickle")
    assert in_a_process(spawns)[0] == 18.0
