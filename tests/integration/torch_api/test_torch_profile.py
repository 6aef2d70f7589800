"""Step profiles recorded on real ranks, and predicted bytes beside those that engines count."""

import itertools
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.base import algorithm_choice
from bagua.base.errors import ConfigError
from bagua.torch_api.train.recorder import END, FILE, STEPS, WARM_UP
from bagua.tuning.advice import predict
from bagua.tuning.exchanges import exchange_of
from bagua.tuning.network import Network
from bagua.tuning.partition import default_cuts
from bagua.tuning.predict import Cluster
from bagua.tuning.profile import Gradient, StepProfile

WIDTH = 256


def wrapped(algorithm=None, width=WIDTH):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model.with_bagua([optimizer], algorithm), optimizer


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()


def rank_is_recorded():
    bagua.init_process_group()
    model, optimizer = wrapped(Algorithm.init("local_sgd"))
    other, _ = wrapped()
    assert [type(one.bagua_algorithm).__name__ for one in (model, other)] == ["GradientAllReduceAlgorithmImpl"] * 2
    steps = 0
    with pytest.raises(SystemExit) as end:
        for _ in itertools.count():
            train(model, optimizer)
            steps += 1
    assert (end.value.code, steps) == (0, WARM_UP + 4)
    if bagua.get_rank() == 0:
        assert_profile(model)


def assert_profile(model):
    found = StepProfile.load(Path(os.environ[FILE]))
    assert (found.steps, found.hosts, found.ranks_per_host, found.threads) == (4, 1, 2, 1)
    assert {one.name: one.numel for one in found.parameters} == {n: p.numel() for n, p in model.named_parameters()}
    layers = [one.name.partition(".")[0] for one in found.parameters]
    assert layers == ["3", "3", "2", "2", "1", "1", "0", "0"]  # as backward reaches them
    ready = [one.ready_ns for one in found.parameters]
    assert 0 < ready[0] <= ready[-1] <= found.backward_ns
    assert found.forward_ns > 0 and found.rest_ns > 0
    assert [cost.bytes for cost in found.buckets] == [4 * bucket.elements for bucket in model.bagua_buckets]
    assert all(cost.wire_s >= cost.exposed_s >= 0 for cost in found.buckets)
    names = [list(bucket.names) for bucket in model.bagua_buckets]
    assert [sorted(cut) for cut in default_cuts(found)] == [sorted(cut) for cut in names]


def test_a_profile(ranks, tmp_path):
    environment = {FILE: str(tmp_path / "profile.json"), STEPS: "4", END: "1"}
    ranks.run(rank_is_recorded, 2, environment=environment)


def rank_is_alone(steps):
    """Settings that can't be; a program that goes on behind its profile, or is too short for one."""
    bagua.init_process_group()
    heard, handler = [], logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("bagua").addHandler(handler)
    if os.environ.get(STEPS) == "0":
        with pytest.raises(ConfigError, match=f"{STEPS} is 0"):
            wrapped()
        return
    made = wrapped()
    for _ in range(steps):
        train(*made)
    bagua.destroy_process_group()
    short = f"ended after {steps} training steps, and {WARM_UP + 20} are needed"
    assert any(short in line for line in heard) == (STEPS not in os.environ), heard


def test_without_an_end_the_program_goes_on(ranks, tmp_path):
    file = tmp_path / "profile.json"
    for variables, steps in (({}, 3), ({STEPS: "0"}, 0), ({STEPS: "2"}, WARM_UP + 5)):
        assert not file.exists()
        ranks.run(rank_is_alone, 1, environment={FILE: str(file), **variables}, steps=steps)
        ranks.close()
    assert StepProfile.load(file).steps == 2


TEXTS = (
    *("gradient_allreduce", "gradient_allreduce:codec=fp16", "bytegrad", "top_k:density=0.1", "power_sgd"),
    *("decentralized", "low_precision_decentralized", "local_sgd:interval=2", "diloco:interval=2,codec=int4"),
    *("streaming_diloco:interval=4", "no_loco:interval=2", "decentralized:peer_selection_mode=shift_one"),
)
PERIOD = 4


def rank_counts_bytes(texts):
    hosts = bagua.get_world_size()  # one rank each
    for text in texts:
        name, arguments = algorithm_choice.parse(text)
        model, optimizer = wrapped(Algorithm.init(name, **arguments))
        parameters = tuple(
            Gradient(label, "float32", one.numel(), 1, rows=one.shape[0] if one.dim() > 1 else 1)
            for label, one in reversed(list(model.named_parameters()))
        )
        for _ in range(PERIOD):
            train(model, optimizer)
        model.bagua_ddp.join()
        bagua.barrier()
        before = bagua.communication.statistics().bytes_sent
        for _ in range(PERIOD):
            train(model, optimizer)
        model.bagua_ddp.join()
        sent = (bagua.communication.statistics().bytes_sent - before) / PERIOD
        found = predict(StepProfile(parameters, 1, 1, 1), Cluster(Network(), hosts), exchange_of(text))
        # Frames and descriptions of operations, for each peer, come on top.
        assert found.sent_bytes == pytest.approx(sent, rel=0.05, abs=5000 * (hosts - 1)), (text, found.sent_bytes, sent)
        model.bagua_ddp.close()


@pytest.mark.parametrize("hosts", [2, *(pytest.param(number, marks=pytest.mark.full) for number in (3, 4))])
def test_predicted_bytes_are_those_that_engines_send(pools, hosts):
    """The simulation of docs/study.md rests on those of more hosts."""
    pools(*([host] for host in range(hosts))).run(rank_counts_bytes, texts=list(TEXTS if hosts == 2 else TEXTS[:5]))
