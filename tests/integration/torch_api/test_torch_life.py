"""Beginning, end and faults of ranks: nobody waits in vain, and everybody learns why."""

import os
import re
import sys
import time

import pytest
import torch
from rig.checkpoints import await_true
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.job import start
from bagua.torch_api.job.session import current


def wrap(model, *optimizers):
    return model.with_bagua(list(optimizers), GradientAllReduceAlgorithm())


def await_kinds(ranks, wanted):
    """The engine's events, which come when they come."""
    await_true(lambda: sorted(event["kind"] for event in ranks.hosts[0].told) == wanted)


def rank_begin_and_end():
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


def test_begin_and_end(ranks):
    ranks.run(rank_begin_and_end, 2)
    await_kinds(ranks, ["joined", "joined", "left", "left"])


def rank_reports_and_is_refused():
    """Reports of a job that it then leaves; what the daemon says to a rank that is not its own."""
    bagua.init_process_group()
    for step in range(1000):
        bagua.report(step=step, total=1000, metrics={"loss": 1 / (step + 1)}, message="training")
    bagua.report(step=1, metrics={"loss": "none"})
    bagua.report(step=999, total=1000, metrics={"loss": torch.ones(1, requires_grad=True) * 1e-3}, message="training")
    bagua.destroy_process_group()
    os.environ["RANK"] = "7"
    with pytest.raises(BaguaError, match="rank 7 is not on this node"):
        bagua.init_process_group()
    os.environ["BAGUA_DAEMON_SOCKET"] += ".nobody"
    with pytest.raises(BaguaError, match="Is it running"):
        bagua.init_process_group()


def test_the_newest_report_arrives_and_few_are_sent(ranks):
    ranks.run(rank_reports_and_is_refused, 1)
    sent = ranks.hosts[0].progress
    assert len(sent) < 20
    assert "This progress report was ignored" in ranks.started[0].output
    assert (sent[-1].step, sent[-1].total, sent[-1].message) == (999, 1000, "training")
    assert sent[-1].metrics["loss"] == pytest.approx(1e-3)


def models(case):
    one, optimizers = bagua.get_rank() == 1, []
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))
    if case == "frozen" and one:
        model[0].bias.requires_grad_(False)
    if case == "sparse":
        model[0] = nn.Embedding(10, 10, sparse=one)
    if case == "state" or (case == "optimizers" and one):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    if case == "state" and not one:
        optimizers[0].state[model[0].bias] = {"what": object()}
    return model, optimizers


DIFFERENCES = {
    "frozen": ["0.bias float32 [10]", "not trained"],
    "optimizers": ["optimizers differ", "SGD"],
    "sparse": ["settings differ", "'sparse gradients': []", "'sparse gradients': ['0.weight']"],
    "state": ["object"],
}
"""``unit/torch_api/test_torch_layout.py`` has more; so have the mistakes of the contract suite."""


def rank_differ(case):
    model, optimizers = models(case)
    with pytest.raises(BaguaError) as refused:
        wrap(model, *optimizers)
    return str(refused.value)


@pytest.mark.parametrize("case", DIFFERENCES)
def test_models_that_differ_are_refused_on_every_rank(pools, case):
    told = pools([0, 1, 2]).run(rank_differ, case=case)
    assert told[0] == told[2]
    assert all(word in text for text in told for word in DIFFERENCES[case]), told


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ArithmeticError("on purpose")


def rank_abandons_a_pass():
    """An exception half-way through backward, when part of the gradients are under way already."""
    bagua.init_process_group()
    model = wrap(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))
    model[1](torch.ones(2, 10)).sum().backward()  # the first pass exchanges nothing before its end
    model[0].register_forward_hook(lambda _, __, found: Fails.apply(found))
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, 10)).sum().backward()
    with pytest.raises(BaguaError, match="no longer in step"):
        model(torch.ones(2, 10))


def test_a_pass_that_was_begun_and_not_ended_is_an_error(ranks):
    ranks.run(rank_abandons_a_pass, 2, environment={"BAGUA_DEFAULT_BUCKET_SIZE": "400"})


class Checks(TensorDataset):
    """Says from inside a worker whether it may communicate."""

    def __getitem__(self, index):
        with pytest.raises(BaguaError, match="forked"):
            bagua.barrier()
        bagua.report(step=1)
        return super().__getitem__(index)


def rank_forks_workers():
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


def test_forked_workers_leave_the_connection_alone(ranks):
    ranks.run(rank_forks_workers, 2)
    await_kinds(ranks, ["joined", "joined", "left", "left"])


def rank_receives_from_the_other():
    os.environ["BAGUA_WAIT_TIMEOUT_S"] = "1"
    bagua.init_process_group()
    with pytest.raises(CommunicationError) as error:
        bagua.recv(bagua.empty(4), src=1 - bagua.get_rank())
    return str(error.value)


def test_ranks_that_wait_for_each_other_give_up(ranks):
    told = ranks.run(rank_receives_from_the_other, 2)
    gave_up = [text for text in told if "gave up after 1 s" in text and "BAGUA_WAIT_TIMEOUT_S" in text]
    assert gave_up and all(text in gave_up or "has left the job" in text for text in told), told


def rank_waits_long():
    from bagua.torch_api.job import connection

    connection.FIRST_WARNING_S = connection.WARNING_EVERY_S = 0.5
    bagua.init_process_group()
    if bagua.get_rank() == 1:
        time.sleep(1.5)
    bagua.allreduce_inplace(torch.ones(1))


def test_a_long_wait_is_logged_with_who_waits_for_whom(ranks):
    ranks.run(rank_waits_long, 2)
    # Before torch 2.8 number 0 was a vote on torch.distributed.
    assert re.search(r"all-reduce #[01] of world: rank 0 has been waiting for rank 1", ranks.started[0].output)
    assert "wait" not in ranks.started[1].output


def rank_too_large():
    """The error for a model that one host has no memory for. A smaller one can be trained afterwards."""
    bagua.init_process_group()
    before = current().connection.counters()["segment_bytes"]
    with pytest.raises(BaguaError, match=r"16 MiB for rank.*the limit of this engine, 20 MiB") as told:
        wrap(nn.Linear(2000, 2000))
    bagua.barrier()
    assert current().connection.counters()["segment_bytes"] - before < 10 << 20
    bagua.barrier()
    small = wrap(nn.Linear(20, 20))
    small(torch.ones(1, 20)).sum().backward()
    assert bool((small.weight.grad == 1).all())
    return str(told.value)


def test_a_model_that_memory_does_not_suffice_for_is_refused_on_every_rank(ranks):
    """Each rank needs 16 MiB, 4 million float32. The second host has 20 MiB for two ranks."""
    found = ranks.run(rank_too_large, hosts=[[0], [1, 2]], memory_limits=[0, 20 << 20])
    assert "Another rank failed. rank 1" in found[0]


def rank_ends(how):
    """Rank 1 comes to its end before the others have done with it."""
    bagua.init_process_group()
    bagua.barrier()
    if bagua.get_rank() == 1:
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
        ("after", 4, ["has failed: sys.exit(4) after OSError: the disk is full"]),
        ("finally", 1, ["has left the job, but", "while it handled ValueError: not a number"]),
        ("caught", 0, ["has left the job in good order"]),
        ("unknown", 0, ["has left the job, but", "while it handled SystemExit"]),
    ],
)
def test_the_others_learn_how_a_rank_ended(ranks, how, code, words):
    started = ranks.start(rank_ends, 2, how=how)
    ranks.wait(60)
    assert started[1].process.returncode == code, started[1].output
    text = started[0].result()
    assert "rank 1" in text and all(part in text for part in words), text


def rank_waits_in_a_circle():
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


def test_ranks_that_wait_for_each_other_learn_it(ranks):
    """Long before the limit of waits, and each where it waits."""
    texts = ranks.run(rank_waits_in_a_circle, 3)
    assert len(set(texts)) == 1 and "[BG502]" in texts[0]
    for words in ("rank 0 in all-reduce", "for rank 1", "rank 1 in broadcast", "for rank 0"):
        assert words in texts[0], texts[0]


def rank_has_other_batches():
    bagua.init_process_group()
    model = wrap(nn.Linear(4, 4))
    with pytest.raises(CommunicationError) as told:
        for _ in range(3 + 2 * bagua.get_rank()):
            model(torch.ones(2, 4)).sum().backward()
        bagua.destroy_process_group()
        raise CommunicationError("done")
    return str(told.value)


def test_different_numbers_of_batches_are_named(ranks):
    done, text = ranks.run(rank_has_other_batches, 2)
    assert done == "done"
    assert "rank 0: 3, rank 1: 4" in text and "bagua.join" in text and "[BG502]" in text, text
