"""SyncBatchNorm on several ranks against BatchNorm on one process with the whole batch."""

import copy
import functools

import pytest
import torch
from rig.ranks import placing
from rig.ranks.faults import kill_self
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.job.session import current

CHANNELS = 5
SIZES = (3, 1, 4, 2)  # of the ranks' batches
PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Messages:
    """Counts what this rank exchanges with others."""

    def __init__(self, patch):
        self.count = 0
        connection = current().connection
        plain, submit = connection.transfer, CudaConnection.submit

        def transfer(*request):
            self.count += 1
            plain(*request)

        def submit_on_device(lane, request):
            self.count += 1
            return submit(lane, request)

        patch.setattr(connection, "transfer", transfer)
        patch.setattr(CudaConnection, "submit", submit_on_device)

    def take(self):
        taken, self.count = self.count, 0
        return taken


def close(found, wanted, dtype, what):
    if found is None or wanted is None:
        assert found is wanted, what
        return
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
    limit = CLOSE[dtype] * max(1.0, wanted.detach().abs().max().item() if wanted.numel() else 1.0)
    torch.testing.assert_close(found, wanted, atol=limit, rtol=0.0, msg=lambda text: f"{what}: {text}")


def compare(messages, dimensions, sizes, dtype=torch.float32, offset=0.0, layout=torch.contiguous_format, **options):
    """Three steps and an evaluation: outputs, gradients, buffers."""
    me, what = bagua.get_rank(), f"{dimensions} {sizes} {dtype} {offset} {options}"
    plain = PLAIN[dimensions](CHANNELS, **options)
    plain = plain.double() if dtype == torch.float64 else plain
    if plain.affine:
        nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(5))
        nn.init.normal_(plain.bias, generator=torch.Generator().manual_seed(6))
    layer = convert_sync_batchnorm(copy.deepcopy(plain))
    assert type(layer) is SyncBatchNorm
    begin = sum(sizes[:me])
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        shape = (sum(sizes), CHANNELS, *(4, 3, 2)[:dimensions])
        whole = (torch.randn(shape, generator=generator, dtype=torch.float64) + offset).to(dtype, memory_format=layout)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        mine = whole[begin : begin + sizes[me]].clone(memory_format=torch.preserve_format).requires_grad_()
        whole.requires_grad_()
        for one in (plain, layer):
            one.zero_grad()
        messages.take()
        found = layer(mine)
        assert messages.take() == (len(sizes) > 1), what
        (found * weights[begin : begin + sizes[me]]).sum().backward()
        assert messages.take() == (len(sizes) > 1), what
        wanted = plain(whole)
        (wanted * weights).sum().backward()
        assert whole.grad is not None
        close(found, wanted[begin : begin + sizes[me]], dtype, f"{what} output")
        close(mine.grad, whole.grad[begin : begin + sizes[me]], dtype, f"{what} gradient")
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            bagua.allreduce_inplace(parameter.grad)
            close(parameter.grad, plain.get_parameter(name).grad, dtype, f"{what} gradient of {name}")
        for name, buffer in layer.named_buffers():
            close(buffer, plain.get_buffer(name), torch.float32, f"{what} {name}")
    layer.eval(), plain.eval()
    messages.take()
    if me == 0 and plain.track_running_stats:
        close(layer(whole), plain(whole), dtype, f"{what} evaluation")
    assert messages.take() == 0, what


def rank_normalises():
    n = bagua.get_world_size()
    sizes = SIZES[:n]
    with pytest.MonkeyPatch.context() as patch:
        check = functools.partial(compare, Messages(patch))
        for dimensions in PLAIN:
            check(dimensions, sizes if dimensions or n > 1 else (6,))
        check(2, sizes, torch.float64)
        check(2, sizes, offset=30.0)
        check(2, sizes, layout=torch.channels_last)
        check(2, sizes, torch.bfloat16)
        check(1, sizes, torch.float16)
        for affine, track in ((True, False), (False, True), (False, False)):
            check(1, sizes, affine=affine, track_running_stats=track, eps=1e-3)
        check(2, sizes, momentum=None)
        if n > 1:
            check(2, (0, *sizes[1:]))
            check(0, (1,) * n)


@pytest.mark.parametrize(
    ("hosts", "device"),
    [([[0, 1], [2]], "cpu"), ([[0], [1]], "fake"), pytest.param([[0]], "cpu", marks=pytest.mark.full)],
    ids=["2+1", "fake", "1"],
)
def test_equal_to_one_process(pools, hosts, device):
    pools(*hosts, environment=placing.environment(device, "staged")).run(rank_normalises)


def small_model(seed):
    torch.manual_seed(seed)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6)
    return nn.Sequential(*layers, nn.Linear(6, 1)).double()


def rank_trains():
    """In a wrapped model, under gradient all-reduce, with groups of its own, and with its mistakes."""
    me, n = bagua.get_rank(), bagua.get_world_size()
    model, plain = convert_sync_batchnorm(small_model(me)), small_model(0)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    model.with_bagua(optimizers[:1])
    for step in range(4):
        whole = torch.randn(4 * n, 2, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for one, batch, optimizer in zip((model, plain), (whole[4 * me : 4 * me + 4], whole), optimizers, strict=True):
            optimizer.zero_grad()
            one(batch).square().mean().backward()
            optimizer.step()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], wanted, rtol=1e-9, atol=1e-12)

    pair = bagua.communication.new_group([0, 2])
    alone = SyncBatchNorm(1, process_group=pair)
    alone(torch.tensor([[me**2.0], [me**2 + 2.0]]))
    assert alone.running_mean is not None
    assert alone.running_mean.item() == pytest.approx(0.2 if me == 1 else 0.3, abs=1e-6)

    with pytest.raises(ValueError, match=r"must be \[batch, 3, ...\]"):
        SyncBatchNorm(3)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="fewer than 2 values for each channel"):
        SyncBatchNorm(1)(torch.ones(int(me == 1), 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layers = convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        assert layers(torch.randn(4, 2)).dtype == torch.bfloat16
    bagua.barrier()


def test_training(pools):
    pools([0, 1], [2]).run(rank_trains)


def rank_loses_one():
    """Member 1 is lost between two exchanges of forward, and member 0 in the middle of backward."""
    bagua.init_process_group()
    member = current().membership.member
    model = convert_sync_batchnorm(small_model(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(member), dtype=torch.float64)
        model[:2](inputs)
        if (member, step) == (1, 2):
            kill_self()
        loss = model(inputs).square().mean()
        if (member, step) == (0, 4):
            model[4].weight.register_hook(lambda _: kill_self())
        loss.backward()
        optimizer.step()
    return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


def test_an_elastic_job_goes_on(ranks):
    for one, other in zip(*ranks.survive(rank_loses_one, (0, 1), hosts=[[0, 1], [2, 3]]), strict=True):
        assert torch.equal(one, other) and bool(one.isfinite().all())


def test_conversion():
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(shared, nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.ReLU()), shared)
    model.eval()
    made = convert_sync_batchnorm(model)
    assert made is model and made[0] is made[2] and made[0].weight is shared.weight
    assert isinstance(made[1][0], SyncBatchNorm) and not made[1][0].training
    assert made[1][0].running_mean.device.type == "cpu" and made[1][0].weight is None
    assert list(SyncBatchNorm(3).state_dict()) == list(nn.BatchNorm1d(3).state_dict())
    assert SyncBatchNorm.convert_sync_batchnorm(made) is made
    with pytest.raises(TypeError, match="no shape yet"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    single = convert_sync_batchnorm(nn.BatchNorm1d(3))
    assert single(torch.randn(4, 3)).mean(0).abs().max() < 1e-6  # without a job
