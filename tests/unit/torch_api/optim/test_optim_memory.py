"""Fused optimizers and memory: gradients side by side, parameters that others hold, formats."""

import torch
from rig.optimizer_pairs import adam, differences, gradients, members, pair, parameters, train

from bagua.torch_api.contrib import fuse_optimizer


def flat_gradients(some, sides=2):
    """Views behind one another, in several buffers."""
    found = []
    for _ in range(sides):
        memory, views, begin = torch.zeros(sum(one.numel() for one in some)), [], 0
        for one in some:
            views.append(memory[begin : begin + one.numel()].view(one.shape))
            begin += one.numel()
        found.append(views)
    return found


def test_gradients_side_by_side_are_not_copied():
    """Weights and biases in turn, as the layers of a model have them: each lie at equal distances."""
    shapes = [(6, 5), (6,)] * 12
    plain, fused = adam(parameters(shapes=shapes)), fuse_optimizer(adam(parameters(shapes=shapes)))
    sides = flat_gradients(members(fused))
    for step in range(5):
        gradients(step, members(plain))
        for one, other, view in zip(members(plain), members(fused), sides[step % 2], strict=True):
            assert one.grad is not None
            other.grad = view.copy_(one.grad)
        plain.step()
        fused.fuse_step()
        assert differences(plain, fused) == []
        assert all(one.grad is view for one, view in zip(members(fused), sides[step % 2], strict=True))
    fusion = fused._bagua_fused_optimizer
    assert fused._bagua_fused_optimizer.count == 24 and len(fusion.blocks) == 2
    assert all(block._gradients is None for block in fusion.blocks)


def test_parameters_in_memory_of_others_stay_there():
    shapes = [(6, 5), (6,), (3, 10)] * 6
    plain, fused = adam(parameters(shapes=shapes)), fuse_optimizer(adam(parameters(shapes=shapes)))
    (views,) = flat_gradients(members(fused), sides=1)
    for one, view in zip(members(fused), views, strict=True):
        view.copy_(one.detach())
        one.data = view
    places = [one.data_ptr() for one in members(fused)]
    train(plain, fused, 4)
    assert [one.data_ptr() for one in members(fused)] == places and fused._bagua_fused_optimizer.count == 18


def test_without_flattening_parameters_keep_their_memory():
    plain, fused = pair(adam, do_flatten=False)
    places = [one.data_ptr() for one in members(fused)]
    train(plain, fused, 4)
    assert [one.data_ptr() for one in members(fused)] == places and fused._bagua_fused_optimizer.count == 17


def test_memory_formats_and_odd_strides():
    def make():
        some = parameters(shapes=[(4, 3, 2, 2), (4, 3, 2, 2), (6, 8), (8, 6)])
        some[0].data = some[0].data.to(memory_format=torch.channels_last)
        some[2].data = some[2].data.t().contiguous().t()
        return some

    plain, fused = adam(make()), fuse_optimizer(adam(make()))
    train(plain, fused, 4)
    assert fused._bagua_fused_optimizer.count == 4
    assert members(fused)[0].is_contiguous(memory_format=torch.channels_last)


def test_sparse_gradients_beside_dense_ones():
    def trained(fused):
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(5, 2, sparse=number == 1) for number in range(4)]
        optimizer = torch.optim.SGD([table.weight for table in tables], lr=0.1)
        for step in range(4):
            (fuse_optimizer(optimizer) if fused and not step else optimizer).zero_grad()
            torch.stack([table(torch.tensor([step, 2])) for table in tables]).square().sum().backward()
            (optimizer.fuse_step if fused else optimizer.step)()
        return optimizer

    plain, fused = trained(False), trained(True)
    assert all(map(torch.equal, members(plain), members(fused))) and fused._bagua_fused_optimizer.count == 2
