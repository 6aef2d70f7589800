"""Beginning, end and faults of ranks: nobody waits in vain, and everybody learns why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.job import start
from bagua.torch_api.job.session import current


def wrap(model: nn.Module, *optimizers: torch.optim.Optimizer) -> nn.Module:
    return model.with_bagua(list(optimizers), GradientAllReduceAlgorithm())


def rank_begin_and_end() -> None:
    with pytest.raises(BaguaError, match="init_process_group"):
        bagua.barrier()
    assert not bagua.communication.is_initialized()
    for name in ("LOCAL_WORLD_SIZE", "NODE_RANK"):
        del os.environ[name]
    bagua.init_process_group()
    assert bagua.is_initialized() and bagua.get_local_size() == 2 and bagua.get_node_rank() == 0
    with pytest.raises(RuntimeError, match="twice"):
        bagua.init_process_group()
    model = wrap(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    gradient = model.weight.grad
    before = gradient.clone()
    shared = bagua.empty(100)
    bagua.barrier()
    bagua.destroy_process_group()
    bagua.destroy_process_group()
    assert not bagua.is_initialized()
    assert torch.equal(gradient, before)  # memory stays as long as somebody sees it
    gradient.add_(1)
    shared.fill_(1)
    with pytest.raises(BaguaError, match="init_process_group"):
        bagua.barrier()


def test_begin_and_end(ranks: Any) -> None:
    ranks.run(rank_begin_and_end, 2)
    assert sorted(event["kind"] for event in ranks.hosts[0].told) == ["joined", "joined", "left", "left"]


def rank_report() -> None:
    bagua.init_process_group()
    for step in range(1000):
        bagua.report(step=step, total=1000, metrics={"loss": 1 / (step + 1)}, message="training")
    bagua.report(step=1, metrics={"loss": "none"})  # type: ignore[dict-item]
    bagua.report(step=999, total=1000, metrics={"loss": torch.ones(1, requires_grad=True) * 1e-3}, message="training")


def test_the_newest_report_arrives_and_few_are_sent(ranks: Any) -> None:
    ranks.run(rank_report, 1)
    sent = ranks.hosts[0].progress
    assert len(sent) < 20
    assert "This progress report was ignored" in ranks.started[0].output
    assert (sent[-1].step, sent[-1].total, sent[-1].message) == (999, 1000, "training")
    assert sent[-1].metrics["loss"] == pytest.approx(1e-3)


def rank_refused() -> str:
    os.environ["RANK"] = "7"
    with pytest.raises(BaguaError) as refused:
        bagua.init_process_group()
    os.environ["BAGUA_DAEMON_SOCKET"] += ".nobody"
    with pytest.raises(BaguaError, match="Is it running"):
        bagua.init_process_group()
    return str(refused.value)


def test_refusal_comes_with_the_daemons_words(ranks: Any) -> None:
    assert ranks.run(rank_refused, 1) == ["rank 7 is not on this node"]


def models(case: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    one = bagua.get_rank() == 1
    model: nn.Module = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))
    optimizers: list[torch.optim.Optimizer] = []
    if case == "shape" and one:
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 6))
    if case == "order" and one:
        model = nn.Sequential(nn.Linear(10, 5), nn.Linear(10, 10))
    if case == "number" and one:
        model.append(nn.Linear(5, 5))
    if case == "dtype" and one:
        model[1].double()
    if case == "frozen" and one:
        model[0].bias.requires_grad_(False)
    if case == "optimizers" and one:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    if case == "sparse":
        model[0] = nn.Embedding(10, 10, sparse=one)
    if case == "state" and not one:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        optimizers[0].state[model[0].bias] = {"what": object()}
    if case == "state" and one:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return model, optimizers


DIFFERENCES = {
    "shape": ["1.weight float32 [5, 10]", "1.weight float32 [6, 10]", "rank 0", "rank 1", "number 2"],
    "order": ["0.weight float32 [10, 10]", "0.weight float32 [5, 10]"],
    "number": ["number 4", "none", "2.weight float32 [5, 5]"],
    "dtype": ["1.weight float32 [5, 10]", "1.weight float64 [5, 10]"],
    "frozen": ["0.bias float32 [10]", "not trained"],
    "optimizers": ["optimizers differ", "SGD"],
    "sparse": ["settings differ", "'sparse gradients': []", "'sparse gradients': ['0.weight']"],
    "state": ["object"],
}


def rank_differ() -> dict[str, str]:
    bagua.init_process_group()
    found = {}
    for case in DIFFERENCES:
        model, optimizers = models(case)
        with pytest.raises(BaguaError) as refused:
            wrap(model, *optimizers)
        found[case] = str(refused.value)
        bagua.barrier()
    return found


def test_models_that_differ_are_refused_on_every_rank(ranks: Any) -> None:
    results = ranks.run(rank_differ, 3)
    for case, words in DIFFERENCES.items():
        assert results[0][case] == results[2][case]
        for rank in (0, 1, 2):
            for word in words:
                assert word in results[rank][case], results[rank][case]


def rank_call_different_things() -> str:
    bagua.init_process_group()
    rank = bagua.get_rank()
    with pytest.raises(CommunicationError) as told:
        bagua.allreduce_inplace(torch.zeros(10, 10 + rank))
    return str(told.value)


def test_different_sizes_in_one_call_name_both(ranks: Any) -> None:
    for text in ranks.run(rank_call_different_things, 2):
        assert "[10, 10]" in text and "[10, 11]" in text


def rank_fails_in_forward(how: str) -> str:
    bagua.init_process_group()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(10, 10)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3 and bagua.get_rank() == 1:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("on purpose")
            return self.body(x)

    model = wrap(Model())
    try:
        for _ in range(4):
            model(torch.ones(2, 10)).sum().backward()
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_the_others_at_once(ranks: Any, how: str) -> None:
    started = ranks.start(rank_fails_in_forward, 3, how=how)
    ranks.wait(60)  # without being told, the others would wait for ever
    assert started[1].process.returncode == (1 if how == "raise" else -signal.SIGKILL)
    for rank in (0, 2):
        assert "rank 1" in started[rank].result()


def rank_abandons_a_pass() -> str:
    """An exception half-way through backward, when part of the gradients are under way already."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("on purpose")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(10, 10)
            self.last = nn.Linear(10, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Fails.apply(self.first(x)))

    bagua.init_process_group()
    model = wrap(Model())
    model.last(torch.ones(2, 10)).sum().backward()  # the first pass exchanges nothing before its end
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, 10)).sum().backward()
    with pytest.raises(BaguaError, match="no longer in step") as told:
        model(torch.ones(2, 10))
    return str(told.value)


def test_a_pass_that_was_begun_and_not_ended_is_an_error(ranks: Any) -> None:
    ranks.run(rank_abandons_a_pass, 2, environment={"BAGUA_DEFAULT_BUCKET_SIZE": "400"})


class Checks(TensorDataset):
    """Says from inside a worker whether it may communicate."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        with pytest.raises(BaguaError, match="forked"):
            bagua.barrier()
        bagua.report(step=1)
        return super().__getitem__(index)


def rank_forks_workers() -> None:
    bagua.init_process_group()
    model = wrap(nn.Linear(4, 1))
    bagua.report(step=0)
    for _ in range(2):
        for (x,) in DataLoader(Checks(torch.randn(16, 4)), batch_size=4, num_workers=2, multiprocessing_context="fork"):
            model(x).sum().backward()
    memory, _ = current().memory.place_empty(3, torch.float32)
    pid = os.fork()
    if pid == 0:
        del memory  # stays the parent's
        sys.exit(0)  # a child that runs the interpreter's exit does not say goodbye for its parent
    assert os.waitpid(pid, 0)[1] == 0
    bagua.allreduce_inplace(memory.fill_(1.0))
    assert memory.tolist() == [2.0] * 3


def test_forked_workers_leave_the_connection_alone(ranks: Any) -> None:
    ranks.run(rank_forks_workers, 2)
    assert sorted(event["kind"] for event in ranks.hosts[0].told) == ["joined", "joined", "left", "left"]


def rank_leaves_early() -> str:
    bagua.init_process_group()
    bagua.barrier()  # all have joined: a rank that joins a failed job is told so by init_process_group
    if bagua.get_rank() == 1:
        return ""
    with pytest.raises(CommunicationError) as told:
        bagua.allreduce_inplace(torch.ones(1))
    return str(told.value)


def test_a_rank_that_left_in_good_order_is_not_waited_for(ranks: Any) -> None:
    text, _, other = ranks.run(rank_leaves_early, 3)
    assert "rank 1" in text and "rank 1" in other


def rank_gives_up() -> str:
    bagua.init_process_group()
    told = ""
    if bagua.get_rank() == 0:
        with pytest.raises(CommunicationError) as error, current().connection.patience(0.5):
            current().connection.barrier()
        told = str(error.value)
    else:
        time.sleep(2.0)
        bagua.barrier()
    bagua.barrier()
    return told


def test_a_wait_with_a_deadline_ends(ranks: Any) -> None:
    text = ranks.run(rank_gives_up, 2)[0]
    assert "Rank 0 gave up" in text and "waiting for rank 1" in text


def rank_receives_from_the_other(shared: bool) -> str:
    os.environ["BAGUA_WAIT_TIMEOUT_S"] = "1"
    bagua.init_process_group()
    tensor = bagua.empty(4) if shared else torch.empty(4)
    with pytest.raises(CommunicationError) as error:
        bagua.recv(tensor, src=1 - bagua.get_rank())
    return str(error.value)


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_that_wait_for_each_other_give_up(ranks: Any, shared: bool) -> None:
    """One at least; the other may learn first that it has left."""
    told = ranks.run(rank_receives_from_the_other, 2, shared=shared)
    gave_up = [text for text in told if "gave up after 1 s" in text and "BAGUA_WAIT_TIMEOUT_S" in text]
    assert gave_up and all(text in gave_up or "has left the job" in text for text in told), told


def rank_waits_long() -> None:
    from bagua.torch_api.job import connection

    connection.FIRST_WARNING_S = connection.WARNING_EVERY_S = 0.5
    bagua.init_process_group()
    if bagua.get_rank() == 1:
        time.sleep(1.5)
    bagua.allreduce_inplace(torch.ones(1))


def test_a_long_wait_is_logged_with_who_waits_for_whom(ranks: Any) -> None:
    ranks.run(rank_waits_long, 2)
    # Before torch 2.8 number 0 was a vote on torch.distributed.
    assert re.search(r"all-reduce #[01] of world: rank 0 has been waiting for rank 1", ranks.started[0].output)
    assert "wait" not in ranks.started[1].output


def rank_remembers_memory() -> list[int]:
    """Wrapping again and again does not pile up memory."""
    import gc

    bagua.init_process_group()
    model = nn.Linear(1000, 1000)
    found = []
    for _ in range(4):
        wrap(model)
        model.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        gc.collect()
        bagua.barrier()
        found.append(current().connection.counters()["segment_bytes"])
        bagua.barrier()
    return found


def test_memory_goes_back_when_a_model_is_wrapped_again(ranks: Any) -> None:
    found = ranks.run(rank_remembers_memory, 2)[0]
    assert max(found) - min(found) < 1 << 20, found


def test_import_starts_nothing() -> None:
    code = "import threading, bagua.torch_api; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def rank_too_large() -> tuple[str, int, bool]:
    """The error for a model that one host has no memory for. A smaller one can be trained afterwards."""
    bagua.init_process_group()
    before = current().connection.counters()["segment_bytes"]
    with pytest.raises(BaguaError) as told:
        torch.nn.Linear(2000, 2000).with_bagua([], GradientAllReduceAlgorithm())
    bagua.barrier()
    held = current().connection.counters()["segment_bytes"] - before
    bagua.barrier()
    small = torch.nn.Linear(20, 20).with_bagua([], GradientAllReduceAlgorithm())
    small(torch.ones(1, 20)).sum().backward()
    return str(told.value), held, bool((small.weight.grad == 1).all())


def test_a_model_that_memory_does_not_suffice_for_is_refused_on_every_rank(ranks: Any) -> None:
    """Each rank needs 16 MiB, 4 million float32. The second host has 20 MiB for two ranks."""
    found = ranks.run(rank_too_large, hosts=[[0], [1, 2]], memory_limits=[0, 20 << 20])
    for text, held, trained in found:
        assert "16 MiB for rank" in text and "the limit of this engine, 20 MiB" in text, text
        assert held < 10 << 20 and trained
    assert "Another rank failed. rank 1" in found[0][0]


def rank_ends(how: str) -> str:
    """Rank 1 comes to its end before the others have done with it."""
    bagua.init_process_group()
    bagua.barrier()
    if bagua.get_rank() == 1:
        if how == "code":
            sys.exit(3)
        if how == "text":
            raise SystemExit("no such file: data.csv")
        if how == "after":
            try:
                raise OSError("the disk is full")
            except OSError:
                sys.exit(4)
        if how == "finally":
            try:
                raise ValueError("not a number")
            finally:
                bagua.destroy_process_group()
        if how == "notes":
            error = ExceptionGroup("two things", [KeyError("a"), TypeError("b")])
            error.add_note("while reading")
            raise error
        if how == "unknown":
            start._leave(None)
            return ""
        try:  # it ends by itself
            sys.exit(5)
        except SystemExit:
            return ""
    with pytest.raises(CommunicationError) as told:
        bagua.allreduce_inplace(torch.ones(1))
    return str(told.value)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("code", 3, ["has failed: sys.exit(3)"]),
        ("text", 1, ["has failed: sys.exit('no such file: data.csv')"]),
        ("after", 4, ["has failed: sys.exit(4) after OSError: the disk is full"]),
        ("finally", 1, ["has left the job, but", "while it handled ValueError: not a number"]),
        ("notes", 1, ["ExceptionGroup: two things", "while reading", "KeyError: 'a'", "TypeError: b"]),
        ("caught", 0, ["has left the job in good order"]),
        ("unknown", 0, ["has left the job, but", "while it handled SystemExit"]),
    ],
)
def test_the_others_learn_how_a_rank_ended(ranks: Any, how: str, code: int, words: list[str]) -> None:
    started = ranks.start(rank_ends, 2, how=how)
    ranks.wait(60)
    assert started[1].process.returncode == code, started[1].output
    text = started[0].result()
    assert "rank 1" in text and all(part in text for part in words), text


def rank_waits_in_a_circle() -> str:
    bagua.init_process_group()
    group = bagua.communication.new_group([0, 1]).get_global_communicator()
    bagua.barrier(group)
    with pytest.raises(CommunicationError) as told:
        if bagua.get_rank() == 0:
            bagua.allreduce_inplace(bagua.empty(1 << 16))
        elif bagua.get_rank() == 1:
            bagua.broadcast(bagua.empty(1 << 16), src=0, comm=group)
        else:
            bagua.barrier()
    return str(told.value)


def test_ranks_that_wait_for_each_other_learn_it(ranks: Any) -> None:
    """Long before the limit of waits, and each where it waits."""
    texts = ranks.run(rank_waits_in_a_circle, 3)
    assert len(set(texts)) == 1 and "[BG502]" in texts[0]
    for words in ("rank 0 in all-reduce", "for rank 1", "rank 1 in broadcast", "for rank 0"):
        assert words in texts[0], texts[0]


def rank_has_other_batches() -> str:
    bagua.init_process_group()
    model = wrap(nn.Linear(4, 4))
    with pytest.raises(CommunicationError) as told:
        for _ in range(3 + 2 * bagua.get_rank()):
            model(torch.ones(2, 4)).sum().backward()
        bagua.destroy_process_group()
        raise CommunicationError("done")
    return str(told.value)


def test_different_numbers_of_batches_are_named(ranks: Any) -> None:
    done, text = ranks.run(rank_has_other_batches, 2)
    assert done == "done"
    assert "rank 0: 3, rank 1: 4" in text and "bagua.join" in text and "[BG502]" in text, text
