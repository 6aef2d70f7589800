"""Fused optimizers, and steps inside backward, have the bits of plain ones."""

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.contrib import fuse_optimizer
from training_scenarios.support import batch, check_identical, mlp, scenario, seeded, square, wrap


def layers():
    """Enough equal ones to be fused; two sizes in turn."""
    return nn.Sequential(*[nn.Linear(10, 10) for _ in range(12)])


def adam(model):
    """Two groups."""
    some = list(model.parameters())
    return torch.optim.Adam([{"params": some[::2]}, {"params": some[1::2], "lr": 0.01}], weight_decay=0.01)


def train(model, optimizer, steps, step="step"):
    for number in steps:
        optimizer.zero_grad()
        square(model, bagua.get_rank(), number).backward()
        getattr(optimizer, step)()


def check_same(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def flat(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def plain(make, optimizer, steps):
    """A wrapped model after these steps of a plain optimizer."""
    model = seeded(make)
    held = optimizer(model)
    wrap(model, held)
    train(model, held, range(steps))
    return model


@scenario
def fused_before_and_after_wrapping():
    wanted = plain(layers, adam, 5)
    for before in (True, False):
        for do_flatten in (True, False):
            model = seeded(layers, seed=bagua.get_rank())
            optimizer = adam(model)
            if before:
                fuse_optimizer(optimizer)
            wrap(model, optimizer, do_flatten=do_flatten)
            if not before:
                fuse_optimizer(optimizer)
            train(model, optimizer, range(3), "fuse_step")
            assert optimizer._bagua_fused_optimizer.count == 24
            wrap(model, optimizer)  # once more, in the middle
            train(model, optimizer, range(3, 5), "fuse_step")
            check_same(model, wanted)
            check_identical(model)


@scenario
def fused_where_weights_are_exchanged_and_through_a_warm_up():
    for name, make in (
        ("decentralized", adam),
        ("qadam", lambda model: QAdamOptimizer(model.parameters(), warmup_steps=3)),
    ):
        trained = []
        for step in ("step", "fuse_step"):
            model = seeded(layers)
            optimizer = fuse_optimizer(make(model))
            model.with_bagua([optimizer], Algorithm.init(name))
            train(model, optimizer, range(7), step)
            trained.append(model)
        assert optimizer._bagua_fused_optimizer.count == 24
        check_same(*trained)


OPTIMIZERS = (
    adam,
    lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True),
    lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
)


@scenario
def steps_in_backward_have_the_same_bits():
    """With schedulers, layers that ranks leave out in turn, and plans of several steps."""

    def loss(model, step):
        x = batch(bagua.get_rank(), step, 6, 10)
        for number in range(12):
            if number % 3 != (step + bagua.get_rank()) % 3:
                x = model[number](x)
        return x.square().mean()

    cases = [("gradient_allreduce", make) for make in OPTIMIZERS] + [("bytegrad", adam), ("power_sgd", adam)]
    for number, (algorithm, make) in enumerate(cases):
        trained = []
        for early in (False, True):
            model = seeded(layers)
            optimizer = make(model)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            options = {"step_in_backward": early, "do_flatten": number % 2 == 0}
            model.with_bagua([optimizer], Algorithm.init(algorithm), **options)
            for step in range(4):
                optimizer.zero_grad()
                loss(model, step).backward()
                optimizer.step()
                scheduler.step()
            trained.append(model)
        check_same(*trained)
        check_identical(model)


@scenario
def parameters_move_in_backward_from_the_second_step_on():
    model = seeded(mlp)
    beside = nn.Parameter(torch.ones(3))  # of no bucket
    optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda one, *_: seen.append(len(one.param_groups[0]["params"])))
    wrap(model, optimizer, step_in_backward=True)
    for step in range(3):
        before = flat(model)
        optimizer.zero_grad()
        beside.grad = torch.ones(3)
        with model.bagua_ddp.no_sync():
            square(model, 0, 9).backward()
        square(model, bagua.get_rank(), step).backward()
        after = flat(model)
        assert torch.equal(before, after) == (step == 0)
        optimizer.step()
        assert torch.equal(after, flat(model)) == (step > 0)
    assert torch.allclose(beside, torch.full((3,), 0.7)) and seen == [7] * 3


class Own(torch.optim.Optimizer):
    """Signs of gradients; ``coupled``: as long as the norm of all; ``counts``: in its groups."""

    def __init__(self, params, coupled=False, counts=False):
        self.coupled = coupled
        super().__init__(params, {"lr": 0.1, "calls": 0, "counts": counts})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            some = [one for one in group["params"] if one.grad is not None]
            norm = torch.cat([one.grad.flatten() for one in some]).norm() if self.coupled else 1.0
            group["calls"] += group["counts"]
            for one in some:
                one.sub_(one.grad.sign() * norm, alpha=group["lr"])


@scenario
def a_step_in_backward_that_ends_by_an_exception():
    """Ctrl-C in optimizer.step() takes no parameter from the optimizer: the model is wrapped again, and trains."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model, optimizer, step_in_backward=True)
    train(model, optimizer, range(2))
    square(model, bagua.get_rank(), 2).backward()

    def interrupted(*_):
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    wrap(model, optimizer, step_in_backward=True)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    before = flat(model)
    train(model, optimizer, range(3, 4))
    assert not torch.equal(before, flat(model))


@scenario
def steps_in_backward_are_refused_where_they_can_not_hold():
    def first_step(make, spoil):
        model = seeded(mlp)
        optimizer = make(model)
        wrap(model, optimizer, step_in_backward=True)
        before = flat(model)
        square(model, bagua.get_rank(), 0).backward()
        try:
            spoil(model, optimizer)
        finally:
            assert torch.equal(before, flat(model)), "it was told too late"

    def then_step(spoil):
        return lambda model, optimizer: (spoil(model, optimizer), optimizer.step())

    def scale(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)

    spoilt = {
        "gradients were changed": then_step(lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        "zero_grad": then_step(lambda _, optimizer: optimizer.zero_grad()),
        "GradScaler": scale,
        "closure": lambda _, optimizer: optimizer.step(lambda: 1.0),
        "settings of its groups": then_step(lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5)),
        "second backward pass": lambda model, _: square(model, bagua.get_rank(), 1).backward(),
    }
    for words, spoil in spoilt.items():
        with pytest.raises(BaguaError, match=words):
            first_step(adam, spoil)
    for own, words in ((dict(coupled=True), "steps alone"), (dict(counts=True), "once for each bucket")):
        model = seeded(mlp)
        optimizer = Own(model.parameters(), **own)
        wrap(model, optimizer, step_in_backward=True)
        square(model, bagua.get_rank(), 0).backward()
        with pytest.raises(BaguaError, match=words):
            optimizer.step()
    model = seeded(mlp)
    with pytest.raises(ConfigError, match="LBFGS"):
        wrap(model, torch.optim.LBFGS(model.parameters()), step_in_backward=True)
    with pytest.raises(ConfigError, match="exchanges gradients"):
        model.with_bagua([adam(model)], Algorithm.init("local_sgd"), step_in_backward=True)
    model = seeded(mlp)
    optimizer = Own(model.parameters())
    wrap(model, optimizer, step_in_backward=True)
    train(model, optimizer, range(3))
    check_same(model, plain(mlp, lambda model: Own(model.parameters()), 3))
    fuse_optimizer(optimizer)
    train(model, optimizer, range(3, 4), "fuse_step")
    assert "steps it in parts" in optimizer._bagua_fused_optimizer.explain()
