"""Replicas that drift apart are found, and those that are to be the same, or to differ, give no alarm."""

import contextlib
import logging

import pytest
import torch
from rig.ranks.faults import kill_self
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.base.replica_check import VARIABLE
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.train import replica_check

RANKS = [0, 1, 2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)  # whose gradient before the norm would be rounding alone
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.frozen(self.norm(self.first(x))))


class Program:
    """A model of a rank, and how it departs from what it should do."""

    optimizer = torch.optim.SGD
    options = {"lr": 1e-3}  # noqa: RUF012
    wrapped_with = {}  # noqa: RUF012

    def __init__(self, rank):
        torch.manual_seed(0)
        self.rank, self.net = rank, Net()
        self.prepare()
        self.made = self.optimizer([*self.net.parameters()], **self.options)
        self.net.with_bagua([self.made], GradientAllReduceAlgorithm(), **self.wrapped_with)
        self.begin()

    def prepare(self):
        """Before the model is wrapped."""

    def begin(self):
        """When it is."""

    def between(self, step):
        """Backward and the optimizer's step."""


# Programs whose replicas drift apart: the pass in which it is found, on which rank, and what differs.
TRAINED = {"first.weight", "norm.weight", "norm.bias", "last.weight", "last.bias"}
FROZEN = {"frozen.weight", "frozen.bias"}


class LoadsAStateAfterWrapping(Program):
    found = 1, 1, TRAINED | FROZEN

    def begin(self):
        if self.rank == 1:
            self.net.load_state_dict({name: one + 1 for name, one in self.net.state_dict().items()})


class StepsInAHook(Program):
    found = 1, 2, {"last.weight"}

    def begin(self):
        mine = torch.optim.SGD([self.net.last.weight], lr=1e-3)
        if self.rank == 2:
            self.net.last.weight.register_post_accumulate_grad_hook(lambda _: mine.step())


class StepsOnceMore(Program):
    found, optimizer, options = (3, 0, TRAINED), torch.optim.Adam, {"lr": 1e-3}

    def between(self, step):
        if (self.rank, step) == (0, 1):
            self.made.step()


class SetsAGradientItself(Program):
    """Of a parameter that no exchange brings one for."""

    found = 2, 1, {"extra"}

    def prepare(self):
        self.net.extra = nn.Parameter(torch.ones(3))

    def between(self, step):
        self.net.extra.grad = torch.full((3,), float(self.rank == 1))


class ChangesAFrozenParameter(Program):
    found = 2, 1, {"frozen.bias"}

    def between(self, step):
        self.net.frozen.bias.data.add_(1e-3 * (self.rank == 1))


class LostAParameter(Program):
    found = 1, 0, {"unused.weight", "unused.bias"}

    def prepare(self):
        self.net.unused = nn.Linear(2, 2).requires_grad_(False)

    def begin(self):
        if self.rank == 0:
            del self.net.unused


# Programs whose replicas are the same, or differ where they may.


class Momentum(Program):
    options = {"lr": 1e-3, "momentum": 0.9, "nesterov": True}  # noqa: RUF012


class Adadelta(Program):
    optimizer = torch.optim.Adadelta


class HasParametersOfItsOwn(Program):
    def prepare(self):
        self.net.mine = nn.Parameter(torch.full((3,), float(self.rank)))
        self.net.expert = nn.Parameter(torch.full((3,), float(self.rank)))
        self.net.expert.expert = True
        self.net._bagua_params_and_buffers_to_ignore = ["mine"]


class IsNotFiniteAnywhere(Program):
    def between(self, step):
        self.net.frozen.weight.data.fill_(torch.inf if self.rank else torch.nan)


class StepsInBackward(Program):
    optimizer, wrapped_with = torch.optim.AdamW, {"step_in_backward": True}


class Lost(Program):
    """Member 2 is lost in the second comparison. After it another one drifts."""

    def between(self, step):
        if step == 0 and self.rank == 2:
            setattr(replica_check, self.after, lambda *_: kill_self())
        if step == 3 and self.rank == 1:
            self.net.frozen.weight.data.mul_(1.001)


PROGRAMS = {one.__name__: one for one in Program.__subclasses__()}
DRIFT = [name for name, one in PROGRAMS.items() if hasattr(one, "found")]
ALIKE = [name for name, one in PROGRAMS.items() if not hasattr(one, "found") and one is not Lost]


@contextlib.contextmanager
def checked(setting, every):
    """Warnings meanwhile."""
    told, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, setting)
        patch.setattr(replica_check, "EVERY", every)
        logging.getLogger("bagua").addHandler(handler)
        try:
            yield told
        finally:
            logging.getLogger("bagua").removeHandler(handler)


def rank_trains(name, setting="error", steps=4, every=500):
    """Number of the pass that raised, or how many there were; the error; warnings."""
    with checked(setting, every) as warnings:
        program = PROGRAMS[name](bagua.get_rank())
        generator = torch.Generator().manual_seed(program.rank)
        try:
            for step in range(steps):
                program.made.zero_grad()
                try:
                    program.net(torch.randn(8, 4, generator=generator)).square().mean().backward()
                except BaguaError as error:
                    return step + 1, str(error), warnings
                program.between(step)
                program.made.step()
            return steps, "", warnings
        finally:
            program.net.bagua_ddp.close()


@pytest.mark.parametrize(
    ("name", "elastic"), [*((name, False) for name in DRIFT), *((name, True) for name in DRIFT[1:4])]
)
def test_all_ranks_are_told_which_parameters_differ_where(pools, name, elastic):
    exchange, rank, names = PROGRAMS[name].found
    found = pools(RANKS, elastic=elastic).run(rank_trains, name=name)
    assert [one[0] for one in found] == [exchange] * 3
    text = found[0][1]
    assert {one[1] for one in found} == {text} and "[BG617]" in text
    assert f"rank {rank} in " in text and any(one in text for one in names)
    assert f"({len(names)} of " in text and not any(one in text for one in (TRAINED | FROZEN) - names)


def test_a_warning_comes_once_on_the_first_rank(pools):
    found = pools(RANKS).run(rank_trains, name="StepsInAHook", setting="warn", steps=12)
    assert [one[0] for one in found] == [12] * 3
    assert [len(one[2]) for one in found] == [1, 0, 0] and "[BG617]" in found[0][2][0]
    assert pools(RANKS).run(rank_trains, name="StepsInAHook", setting="off") == [(4, "", [])] * 3


@pytest.mark.parametrize("name", ALIKE)
def test_no_alarm(pools, name):
    assert pools(RANKS).run(rank_trains, name=name, steps=20, every=1) == [(20, "", [])] * 3


def rank_is_lost(after):
    bagua.init_process_group()
    Lost.after = after
    return rank_trains("Lost", steps=8, every=1)


@pytest.mark.parametrize("after", ["arithmetic", "_eps"])  # before ranks have told each other, and when they have
def test_others_compare_again_when_a_rank_is_lost(ranks, after):
    for step, text, warnings in ranks.survive(rank_is_lost, (2,), 3, after=after):
        assert step == 5 and "rank 1 in frozen.weight (1 of" in text and warnings == []


def rank_settings_differ():
    with checked("off" if bagua.get_rank() else "warn", 500):
        with pytest.raises(BaguaError, match=r"check_replicas.*\[BG603\]"):
            Program(bagua.get_rank())


def test_the_setting_is_the_same_on_all_ranks(pools):
    pools(RANKS).run(rank_settings_differ)


def rank_has_fewer_batches():
    """Replicas without batches make no steps until the block ends."""
    with checked("error", 1) as warnings:
        program = Program(bagua.get_rank())
        for _ in range(2):
            with bagua.join(program.net):
                for _ in range(2 + bagua.get_rank()):
                    program.made.zero_grad()
                    program.net(torch.randn(8, 4)).square().mean().backward()
                    program.made.step()
        program.net.bagua_ddp.close()
        assert warnings == []


def test_ranks_without_batches_are_left_out(pools):
    pools(RANKS).run(rank_has_fewer_batches)
