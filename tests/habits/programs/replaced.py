"""Programs that put something else in the place of gradients."""

import warnings

import torch
from habits.case import gradients, habit, mlp, passes, square, state, step, train, weights, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@habit(kind=1)
def sets_data_of_gradients(by):
    """Clipping, scaling: ``p.grad.data = ...``"""

    def clip(net):
        for one in net.parameters():
            one.grad.data = one.grad.data.clamp(-0.05, 0.05)

    return passes(by, *mlp(), clip)


@habit(kind=1)
def replaces_gradients(by):
    """``p.grad = ...``"""

    def clip(net):
        for one in net.parameters():
            one.grad = one.grad.clamp(-0.05, 0.05)

    return passes(by, *mlp(), clip)


def wide():
    """[*, 4] -> [*, 2], with a weight that is staged by itself."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@habit(kind=1)
def changes_gradients_when_they_are_complete(by):
    """Hooks at complete gradients, some from after the model was wrapped, and one that comes and goes."""

    def clip(one):
        one.grad.data.clamp_(-0.001, 0.001)

    def replace(one):
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
    return state(net)


@habit(kind=1)
def changes_gradients_behind_their_nodes(by):
    """Hooks of the nodes that accumulate gradients."""

    def clip(one):
        one.grad.clamp_(-0.001, 0.001)

    net, optimizer = wide()
    nodes = [one.expand_as(one).grad_fn.next_functions[0][0] for one in net.parameters()]
    for node, one in zip(nodes, net.parameters(), strict=True):
        node.register_hook(lambda *_, one=one: clip(one))
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 4)
    return state(net)


@habit(kind=1)
def drops_gradients(by):
    """Some steps leave parameters alone: their gradient is None, or deleted."""

    def drop(net):
        net[0].weight.grad = None
        del net[2].bias.grad

    return passes(by, *mlp(momentum=0.9), drop)


@habit(kind=1)
def keeps_zeros(by):
    """Gradients are never None: zeros are added to, in memory that stays."""
    places = set()

    def look(net):
        places.add(tuple(one.grad.data_ptr() for one in net.parameters()))

    found = passes(by, *mlp(), look, zeros=lambda number: True)
    return {"places": len(places), **found}


@habit(kind=1)
def frees_memory_of_gradients(by):
    """The storage of a gradient is made empty, as offloading does it."""
    net, model, optimizer = wrapped(by)
    for number in range(4):
        step(by, model, optimizer, number)
        for one in net.parameters():
            one.grad.untyped_storage().resize_(0)
            one.grad = None
    return {"weights": weights(net)}


@habit(kind=1)
def resizes_gradients(by):
    """``resize_`` and ``set_`` of a gradient."""

    def resize(net):
        net[0].weight.grad.resize_(2, 2).resize_(6, 4)
        net[2].weight.grad.set_(torch.ones(2, 6))

    return passes(by, *mlp(), resize)


@habit(kind=1)
def has_gradients_in_one_buffer(by):
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
        square(model, by.batch(number)).backward()
        norms.append(flat.norm())
        flat.mul_(0.1 / flat.norm())
        optimizer.step()
    return {"norms": norms, "flat": flat, "gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def makes_gradients_sparse(by):
    """``p.grad = p.grad.to_sparse()``"""

    def sparse(net):
        net[2].weight.grad = net[2].weight.grad.to_sparse()

    return {"weights": passes(by, *mlp(), sparse)["weights"]}


@habit(kind=1)
def transposes_gradients(by):
    """A gradient of other strides, by which zeros are kept."""

    def transpose(net):
        net[0].weight.grad = net[0].weight.grad.t().contiguous().t()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is slower
        return passes(by, *mlp(), transpose, zeros=lambda number: number < 3)


@habit(kind=1)
def fills_gradients_by_hand(by):
    """No backward pass of the model: autograd.grad, an all-reduce of the program's own, and ``p.grad = ...``."""
    net, model, optimizer = wrapped(by)
    step(by, model, optimizer, 9)
    for number in range(3):
        optimizer.zero_grad()
        found = torch.autograd.grad(square(net, by.batch(number)), list(net.parameters()))
        for one, gradient in zip(net.parameters(), found, strict=True):
            one.grad = by.mean(gradient)
        optimizer.step()
    train(by, model, optimizer)
    return {"weights": weights(net)}


@habit(kind=1)
def shares_one_gradient(by):
    """Two parameters have the same tensor as their gradient, into which zeros are kept."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def share(net):
        net[0].bias.grad = net[2].bias.grad

    found = passes(by, net, torch.optim.SGD(net.parameters(), lr=0.1), share, zeros=lambda number: number < 3)
    return {"weights": found["weights"][::2]}


@habit(kind=1)
def gives_expanded_gradients(by):
    """Hooks return gradients without memory for each element, or views of something that lives on."""
    net, optimizer = mlp()
    held, copies = torch.zeros(12), []
    net[0].bias.register_hook(lambda gradient: gradient.mean().expand_as(gradient))

    def in_held(gradient):
        held.copy_(gradient.flatten())
        return held.view_as(gradient)

    net[2].weight.register_hook(in_held)
    return {"held": copies, **passes(by, net, optimizer, lambda net: copies.append(held.clone()))}


@habit(kind=1)
def has_parameters_of_its_own(by):
    """Parameters that DDP is told to leave alone differ between ranks, and nobody minds."""
    net, optimizer = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight", "2.bias"])
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 30)
    return {"weights": weights(net)}


@habit(kind=1, only=("backend",))
def has_a_hook_that_resizes(by):
    """Hooks of DDP that send half of the bits, and give the bucket's memory back meanwhile."""
    net, model, optimizer = wrapped(by)

    def send_half(group, bucket):  # torch looks at annotations, which are words here
        buffer = bucket.buffer()
        half = buffer.to(torch.float16).div_(by.size)
        size = buffer.untyped_storage().nbytes()
        buffer.untyped_storage().resize_(0)

        def put(future):
            buffer.untyped_storage().resize_(size)
            buffer.copy_(future.value()[0])
            return buffer

        return torch.distributed.all_reduce(half, group=group, async_op=True).get_future().then(put)

    model.register_comm_hook(model.process_group, send_half)
    train(by, model, optimizer, 5)
    return state(net)
