"""Fused optimizers have the bits of plain ones: all of torch.optim."""

import copy
import functools
import io

import pytest
import torch
from rig.optimizer_pairs import adam, differences, gradients, members, pair, parameters, train

from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse.optimizer import is_fused_optimizer

FUSABLE = {
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "foreach": True}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "foreach": True}, {"maximize": True}],
    "AdamW": [{}, {"amsgrad": True}, {"foreach": True}],
    "Adamax": [{}, {"weight_decay": 0.1, "foreach": True}],
    "ASGD": [{}, {"t0": 2, "weight_decay": 0.1}, {"t0": 2, "foreach": True}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True}],
    "RAdam": [{}, {"weight_decay": 0.1, "foreach": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}, {"foreach": True}],
    "Rprop": [{}, {"foreach": True}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}],
}
# Their words begin the reason.
UNFUSABLE = {"LBFGS": "LBFGS", "SparseAdam": "SparseAdam", "Adafactor": "Adafactor", "Muon": "Muon"}


@pytest.mark.parametrize(("keep", "lacking"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", FUSABLE)
def test_bits_of_the_plain_optimizer(name, keep, lacking):
    for flags in FUSABLE[name]:
        plain, fused = pair(functools.partial(getattr(torch.optim, name), **{"lr": 0.01, **flags}))
        train(plain, fused, keep=keep, lacking=lacking)
        assert fused._bagua_fused_optimizer.count > 0
        if not lacking:
            assert fused._bagua_fused_optimizer.count == 17, fused._bagua_fused_optimizer.explain()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adadelta"])
def test_bits_in_other_dtypes(name, dtype):
    flags = FUSABLE[name][-1] if dtype is not torch.complex64 else {}
    plain, fused = pair(lambda groups: getattr(torch.optim, name)(groups, **{"lr": 0.01, **flags}), dtype)
    train(plain, fused)
    assert fused._bagua_fused_optimizer.count > 0


@pytest.mark.parametrize("name", UNFUSABLE)
def test_others_step_plainly_and_say_why(name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    some = parameters(shapes=[(4, 3), (4, 3), (3, 4)])
    optimizer = fuse_optimizer(getattr(torch.optim, name)(some, lr=0.1))
    plain = getattr(torch.optim, name)(parameters(shapes=[(4, 3), (4, 3), (3, 4)]), lr=0.1)
    for step in range(3):
        for one in (plain, optimizer):
            gradients(step, members(one))
            if name == "SparseAdam":
                for parameter in members(one):
                    parameter.grad = parameter.grad.to_sparse(1)
        closure = (lambda: torch.tensor(0.5)) if name == "LBFGS" else None
        plain.step(*[closure] * (closure is not None))
        optimizer.fuse_step(closure)
    assert all(map(torch.equal, members(plain), members(optimizer)))
    assert optimizer._bagua_fused_optimizer.count == 0
    (reason,) = optimizer._bagua_not_fused
    assert reason.startswith(UNFUSABLE[name]) and optimizer._bagua_not_fused[reason] == 3


def test_flags_that_can_not_be_fused():
    plain, fused = pair(lambda groups: torch.optim.Adam(groups, fused=True))
    train(plain, fused, 2)
    assert fused._bagua_fused_optimizer.count == 0 and "torch's own kernel" in fused._bagua_fused_optimizer.explain()
    differentiable = fuse_optimizer(torch.optim.Adam([one.detach() for one in parameters()], differentiable=True))
    gradients(0, [one.requires_grad_() for one in members(differentiable)])
    for one in members(differentiable):
        one.requires_grad_(False)
    differentiable.fuse_step()
    assert "keeps the history" in differentiable._bagua_fused_optimizer.explain()


# State


def saved(optimizer):
    """A state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_dict_round_trips_in_both_directions():
    plain, fused = pair(adam)
    train(plain, fused, 3)
    into_plain, into_fused = pair(adam)
    for source, target in ((fused, into_plain), (plain, into_fused)):
        with torch.no_grad():
            for one, other in zip(members(source), members(target), strict=True):
                other.copy_(one)
        target.load_state_dict(saved(source))
    assert differences(into_plain, into_fused) == []
    train(into_plain, into_fused, 3, first=3)
    assert into_fused._bagua_fused_optimizer.count > 0
    fused.load_state_dict(saved(into_plain))  # into one that has blocks
    plain.load_state_dict(saved(into_plain))
    train(plain, fused, 3, first=6)


def test_plain_and_fused_steps_in_turn():
    plain, fused = pair(adam)
    for step in range(8):
        for one in (plain, fused):
            gradients(step, members(one))
        plain.step()
        (fused.step if step % 3 == 2 else fused.fuse_step)()
        assert differences(plain, fused) == []


def test_a_copy_is_an_ordinary_optimizer():
    plain, fused = pair(adam)
    train(plain, fused, 3)
    copied = copy.deepcopy(fused)
    assert not is_fused_optimizer(copied)
    gradients(3, members(copied))
    gradients(3, members(plain))
    copied.step()
    plain.step()
    assert differences(plain, copied) == []


def test_parameters_that_move_and_groups_that_come():
    plain, fused = pair(adam)
    train(plain, fused, 3)
    for one in (plain, fused):
        first = members(one)[0]
        first.data = first.data.clone()  # as model.to() does
        one.add_param_group({"params": parameters(shapes=[(7,), (7,), (33,)]), "lr": 0.3})
    train(plain, fused, 4, first=3)
    assert fused._bagua_fused_optimizer.count == 19


# Memory


def test_autograd_notices_a_step_between_forward_and_backward():
    some = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = fuse_optimizer(torch.optim.SGD(some, lr=0.1))
    for _ in range(2):
        gradients(0, some)
        optimizer.fuse_step()
    product = (some[0] * some[1]).sum()
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# The optimizer's surroundings


def test_hooks_see_the_optimizer_as_it_is():
    seen = []

    def look(when):
        def hook(optimizer, *_):
            shapes = [one.shape for one in members(optimizer)]
            seen.append(when if shapes == [one.shape for one in parameters(shapes=[(7,)] * 3)] else f"{when} {shapes}")

        return hook

    optimizer = adam(parameters(shapes=[(7,)] * 3))
    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))
    fuse_optimizer(optimizer)
    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))
    for step in range(3):
        gradients(step, members(optimizer))
        optimizer.fuse_step()
    assert seen == ["before", "before", "after", "after"] * 3 and optimizer._bagua_fused_optimizer.count == 3


def test_schedulers_count_fused_steps():
    plain, fused = pair(adam)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (plain, fused)]
    for step in range(4):
        train(plain, fused, 1, first=step)
        for scheduler in schedulers:
            scheduler.step()  # a warning, that is an error here, where it did not see the step
    assert fused.param_groups[0]["lr"] == 0.01 * 0.5**4


def test_an_error_inside_the_step_leaves_the_optimizer_whole():
    plain, fused = pair(adam)
    train(plain, fused, 3)
    code = type(fused).step
    gradients(3, members(fused))

    def fails(*_):
        raise OSError("on purpose")

    fused._init_group = fails
    with pytest.raises(OSError, match="on purpose"):
        fused.fuse_step()
    del fused._init_group
    assert differences(plain, fused) == [] and type(fused).step is code
    train(plain, fused, 2, first=3)
