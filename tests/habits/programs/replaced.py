"""Programs that put something else in the place of gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from habits.case import Found, Way, gradients, habit, mlp, step, train, weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def passes(by: Way, change: Any, steps: int = 6, **options: Any) -> Found:
    """Trains with ``change(net)`` between the pass and the optimizer's step."""
    net, optimizer = mlp(**options)
    model = by.wrap(net, optimizer)
    for number in range(steps):
        optimizer.zero_grad()
        model(by.batch(number)).square().mean().backward()
        change(net)
        optimizer.step()
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def sets_data_of_gradients(by: Way) -> Found:
    """Clipping, scaling: ``p.grad.data = ...``"""

    def clip(net: nn.Module) -> None:
        for one in net.parameters():
            one.grad.data = one.grad.data.clamp(-0.05, 0.05)  # type: ignore[union-attr]

    return passes(by, clip)


@habit(kind=1)
def replaces_gradients(by: Way) -> Found:
    """``p.grad = ...``"""

    def clip(net: nn.Module) -> None:
        for one in net.parameters():
            one.grad = one.grad.clamp(-0.05, 0.05)  # type: ignore[union-attr]

    return passes(by, clip)


def wide() -> tuple[nn.Module, torch.optim.Optimizer]:
    """[*, 4] -> [*, 2], with a weight that is staged by itself."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@habit(kind=1)
def changes_gradients_when_they_are_complete(by: Way) -> Found:
    """Hooks at complete gradients, some from after the model was wrapped, and one that comes and goes."""

    def clip(one: Any) -> None:
        one.grad.data.clamp_(-0.001, 0.001)

    def replace(one: Any) -> None:
        one.grad = one.grad.sign() * 0.01

    net, optimizer = wide()
    net[0].weight.register_post_accumulate_grad_hook(clip)
    model = by.wrap(net, optimizer)
    net[2].weight.register_post_accumulate_grad_hook(clip)
    net[0].bias.register_post_accumulate_grad_hook(replace)
    train(by, model, optimizer, 2)
    handles = [one.register_post_accumulate_grad_hook(clip) for one in net.parameters()]
    train(by, model, optimizer, 2)
    for handle in handles:
        handle.remove()
    train(by, model, optimizer, 2)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def changes_gradients_behind_their_nodes(by: Way) -> Found:
    """Hooks of the nodes that accumulate gradients."""

    def clip(one: Any) -> None:
        one.grad.clamp_(-0.001, 0.001)

    net, optimizer = wide()
    nodes = [one.expand_as(one).grad_fn.next_functions[0][0] for one in net.parameters()]
    for node, one in zip(nodes, net.parameters(), strict=True):
        node.register_hook(lambda *_, one=one: clip(one))
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 4)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def swaps_gradients(by: Way) -> Found:
    """Two parameters of one shape change theirs."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = by.wrap(net, optimizer)
    for number in range(5):
        optimizer.zero_grad(set_to_none=number != 2)
        model(by.batch(number)).square().mean().backward()
        net[0].weight.grad, net[2].weight.grad = net[2].weight.grad, net[0].weight.grad
        optimizer.step()
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def drops_gradients(by: Way) -> Found:
    """Some steps leave parameters alone: their gradient is None, or deleted."""

    def drop(net: Any) -> None:
        net[0].weight.grad = None
        del net[2].bias.grad

    return passes(by, drop, momentum=0.9)


@habit(kind=1)
def detaches_gradients(by: Way) -> Found:
    """As ``zero_grad(set_to_none=False)`` and old loops do it."""

    def detach(net: nn.Module) -> None:
        for one in net.parameters():
            one.grad.detach_()  # type: ignore[union-attr]
            one.grad.requires_grad_(False)  # type: ignore[union-attr]

    return passes(by, detach)


@habit(kind=1)
def keeps_zeros(by: Way) -> Found:
    """Gradients are never None: zeros are added to, in memory that stays."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    places = set()
    for number in range(4):
        optimizer.zero_grad(set_to_none=False)
        model(by.batch(number)).square().mean().backward()
        optimizer.step()
        places.add(tuple(one.grad.data_ptr() for one in net.parameters()))
    return {"places": len(places), "gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def zeroes_by_hand(by: Way) -> Found:
    """``p.grad.zero_()``, ``fill_`` and ``copy_`` in place of zero_grad."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(4):
        model(by.batch(number)).square().mean().backward()
        optimizer.step()
        for place, one in enumerate(net.parameters()):
            if place % 2:
                one.grad.zero_()
            else:
                one.grad.copy_(torch.full_like(one, 0.01))
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def frees_memory_of_gradients(by: Way) -> Found:
    """The storage of a gradient is made empty, as offloading does it."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(4):
        step(by, model, optimizer, number)
        for one in net.parameters():
            one.grad.untyped_storage().resize_(0)
            one.grad = None
    return {"weights": weights(net)}


@habit(kind=1)
def resizes_gradients(by: Way) -> Found:
    """``resize_`` and ``set_`` of a gradient."""

    def resize(net: Any) -> None:
        net[0].weight.grad.resize_(2, 2).resize_(6, 4)
        net[2].weight.grad.set_(torch.ones(2, 6))

    return passes(by, resize)


@habit(kind=1)
def has_gradients_in_one_buffer(by: Way) -> Found:
    """Megatron, Apex: gradients are views of one tensor, which is clipped, zeroed and stepped as a whole."""
    net, _ = mlp()
    flat = torch.zeros(sum(one.numel() for one in net.parameters()))
    begin = 0
    for one in net.parameters():
        one.grad = flat[begin : begin + one.numel()].view_as(one)
        begin += one.numel()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    norms = []
    for number in range(4):
        flat.zero_()
        model(by.batch(number)).square().mean().backward()
        norms.append(flat.norm())
        flat.mul_(0.1 / flat.norm())
        optimizer.step()
    return {"norms": norms, "flat": flat, "gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def takes_the_buffer_of_gradients(by: Way) -> Found:
    """Gradients become views of one tensor after the pass, once and for all."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    flat = torch.zeros(0)
    for number in range(5):
        optimizer.zero_grad(set_to_none=False)
        model(by.batch(number)).square().mean().backward()
        if number == 1:
            flat = torch.cat([one.grad.flatten() for one in net.parameters()])
            begin = 0
            for one in net.parameters():
                one.grad.data = flat[begin : begin + one.numel()].view_as(one)
                begin += one.numel()
        flat.clamp_(-0.05, 0.05)
        optimizer.step()
    return {"flat": flat, "gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def makes_gradients_sparse(by: Way) -> Found:
    """``p.grad = p.grad.to_sparse()``"""

    def sparse(net: Any) -> None:
        net[2].weight.grad = net[2].weight.grad.to_sparse()

    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        model(by.batch(number)).square().mean().backward()
        sparse(net)
        optimizer.step()
    return {"weights": weights(net)}


@habit(kind=1)
def transposes_gradients(by: Way) -> Found:
    """A gradient of other strides, by which zeros are kept."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is slower
        for number in range(4):
            optimizer.zero_grad(set_to_none=number == 3)
            model(by.batch(number)).square().mean().backward()
            net[0].weight.grad = net[0].weight.grad.t().contiguous().t()
            optimizer.step()
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def fills_gradients_by_hand(by: Way) -> Found:
    """No backward pass of the model: autograd.grad, an all-reduce of the program's own, and ``p.grad = ...``."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    step(by, model, optimizer, 9)
    for number in range(3):
        optimizer.zero_grad()
        found = torch.autograd.grad(net(by.batch(number)).square().mean(), list(net.parameters()))
        for one, gradient in zip(net.parameters(), found, strict=True):
            one.grad = by.mean(gradient)
        optimizer.step()
    train(by, model, optimizer)
    return {"weights": weights(net)}


@habit(kind=1)
def scales_with_foreach(by: Way) -> Found:
    """Lists of gradients are changed in place at once, by foreach and by clipping."""

    def scale(net: nn.Module) -> None:
        found = [one.grad for one in net.parameters() if one.grad is not None]
        torch._foreach_mul_(found, 3.0)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=True)
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.2)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3, foreach=False)

    return passes(by, scale)


@habit(kind=1)
def shares_one_gradient(by: Way) -> Found:
    """Two parameters have the same tensor as their gradient, into which zeros are kept."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    for number in range(4):
        optimizer.zero_grad(set_to_none=number == 3)
        model(by.batch(number)).square().mean().backward()
        if number == 0:
            net[0].bias.grad = net[2].bias.grad
        optimizer.step()
    return {"weights": [*weights(net)[:1], *weights(net)[2:3]]}


@habit(kind=1)
def gives_expanded_gradients(by: Way) -> Found:
    """Hooks return gradients without memory for each element, or views of something that lives on."""
    net, optimizer = mlp()
    held = torch.zeros(12)
    net[0].bias.register_hook(lambda gradient: gradient.mean().expand_as(gradient))

    def in_held(gradient: Tensor) -> Tensor:
        held.copy_(gradient.flatten())
        return held.view_as(gradient)

    net[2].weight.register_hook(in_held)
    model = by.wrap(net, optimizer)
    copies = []
    for number in range(4):
        optimizer.zero_grad()
        model(by.batch(number)).square().mean().backward()
        copies.append(held.clone())
        optimizer.step()
    return {"held": copies, "gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def negates_gradients(by: Way) -> Found:
    """Domain adversaries: a function whose backward turns the gradient round; and lazily negated views of one."""

    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return -gradient

    net, optimizer = mlp()
    net[2].bias.register_hook(lambda gradient: torch._neg_view(gradient))
    model = by.wrap(net, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        Turn.apply(model(by.batch(number))).square().mean().backward()
        optimizer.step()
    return {"weights": weights(net)}


@habit(kind=1)
def has_parameters_of_its_own(by: Way) -> Found:
    """Parameters that DDP is told to leave alone differ between ranks, and nobody minds."""
    net, optimizer = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight", "2.bias"])
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 30)
    return {"weights": weights(net)}


@habit(kind=1, only=("backend",))
def has_a_hook_that_resizes(by: Way) -> Found:
    """Hooks of DDP that send half of the bits, and give the bucket's memory back meanwhile."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)

    def send_half(group, bucket):  # type: ignore[no-untyped-def] # torch looks at annotations, which are words here
        buffer = bucket.buffer()
        half = buffer.to(torch.float16).div_(by.size)
        size = buffer.untyped_storage().nbytes()
        buffer.untyped_storage().resize_(0)

        def put(future: Any) -> Tensor:
            buffer.untyped_storage().resize_(size)
            buffer.copy_(future.value()[0])
            return buffer

        return torch.distributed.all_reduce(half, group=group, async_op=True).get_future().then(put)

    model.register_comm_hook(model.process_group, send_half)
    train(by, model, optimizer, 5)
    return {"gradients": gradients(net), "weights": weights(net)}
