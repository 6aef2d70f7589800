"""Fused optimizers of one's own: found out where they can't be fused, and bit-equal where they can."""

import logging

import pytest
import torch
from rig.optimizer_pairs import differences, gradients, members, pair, train

from bagua.torch_api.algorithms.q_adam import QAdamOptimizer


class Counted(torch.optim.Optimizer):
    """A state of plain numbers, and tensors that are made anew in each step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            closure()
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["number"] = state.get("number", 0) + 1
                state["average"] = 0.9 * state.get("average", torch.zeros_like(parameter)) + 0.1 * parameter.grad
                if state["number"] == 4:
                    state["late"] = torch.ones_like(parameter)
                parameter.data = parameter.data - group["lr"] / state["number"] * state["average"]


class PerParameter(Counted):
    """Updates each parameter by itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group["lr"])

    def update(self, parameter, lr):
        raise NotImplementedError


class ByNorm(PerParameter):
    """As LARS and LAMB do."""

    def update(self, parameter, lr):
        average = self.state[parameter]["average"] = parameter.grad.clone()
        parameter.sub_(average * parameter.norm(), alpha=lr)


class ByShape(PerParameter):
    """Weights decay, biases don't."""

    def update(self, parameter, lr):
        assert parameter.grad is not None
        parameter.mul_(0.9 if parameter.dim() > 1 else 1.0).sub_(parameter.grad)


def test_an_optimizer_of_ones_own_with_numbers_and_new_tensors():
    plain, fused = pair(Counted)
    train(plain, fused, 7)
    assert fused._bagua_fused_optimizer.count == 17
    assert [group["calls"] for group in fused.param_groups] == [7, 7]


@pytest.mark.parametrize("of", [ByNorm, ByShape])
def test_an_optimizer_that_looks_at_whole_parameters_is_found_out(of, caplog):
    caplog.set_level(logging.INFO, "bagua")
    plain, fused = pair(of)
    train(plain, fused, 5)
    assert fused._bagua_fused_optimizer.count == 0
    assert "does not treat each element by itself" in fused._bagua_fused_optimizer.explain()
    assert "does not treat each element by itself" in caplog.text


def test_a_class_may_refuse():
    class Refuses(Counted):
        elementwise = False

    plain, fused = pair(Refuses)
    train(plain, fused, 3)
    assert fused._bagua_fused_optimizer.count == 0 and "elementwise" in fused._bagua_fused_optimizer.explain()


def test_qadam_through_its_warm_up_and_with_averaged_momentum():
    plain, fused = pair(lambda groups: QAdamOptimizer(groups, lr=0.01, warmup_steps=3, floor=0.1))
    for step in range(7):
        gradients(step, members(plain))
        gradients(step, members(fused))
        if step > 3:  # of all, or of some alone
            for one in (plain, fused):
                some = members(one)[: 5 if step == 5 else None]
                one.averaged.update({parameter: parameter.detach() * 0.1 for parameter in some})
        plain.step()
        fused.fuse_step()
        assert differences(plain, fused) == [] and not fused.averaged
        assert (fused._bagua_fused_optimizer.count > 0) == (step != 2), step
    assert fused.step_id == 7


# Names
