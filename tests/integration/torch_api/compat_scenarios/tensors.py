"""Methods of tensors and buckets without a model, and what must not happen to tensors that have them."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.bucket import BaguaBucket
from compat_scenarios.support import net, scenario


def registered(model, *shapes, dtype=torch.float32):
    rank = bagua.get_rank()
    return [
        torch.full(shape, float(rank + index), dtype=dtype).ensure_bagua_tensor(f"{model} {index}", model)
        for index, shape in enumerate(shapes)
    ]


def expected(index):
    """The mean over ranks of rank + index."""
    return (bagua.get_world_size() - 1) / 2 + index


@scenario
def buckets_without_a_model():
    for flat in (True, False):
        backend = bagua.get_backend("alone")
        assert bagua.get_backend("alone") is backend
        tensors = registered("alone", (3, 2), (5,), (2, 2))
        first = BaguaBucket(tensors[:2], "first", flatten=flat, alignment=4)
        second = BaguaBucket(tensors[2:], "second", flatten=flat)
        assert first.tensors == tensors[:2] and first.name == "first" and first.bytes() == 44
        assert first.check_flatten() == flat and second.padding_tensor is None
        assert first.padding_tensor.numel() == 1
        assert first.flattened_tensor().numel() == 12
        order = []
        assert first.append_python_op(order.append).append_centralized_synchronous_op() is first
        first.append_python_op(lambda name, one=tensors[0]: one.mul_(2))
        second.append_centralized_synchronous_op(average=False, hierarchical=True).append_python_op(order.append)
        backend.register_ordered_buckets([first.backend_bucket, second.backend_bucket])
        for _ in range(2):
            for index, tensor in enumerate(tensors):
                tensor.fill_(bagua.get_rank() + index)
            for tensor in (tensors[2], tensors[1]):
                tensor.bagua_mark_communication_ready()
            assert order == []  # the first bucket is not full
            tensors[0].bagua_mark_communication_ready_without_synchronization()
            assert backend.wait_pending_comm_ops() == 2
            assert order == ["first", "second"]
            order.clear()
            torch.testing.assert_close(tensors[0], torch.full((3, 2), 2 * expected(0)))
            torch.testing.assert_close(tensors[1], torch.full((5,), expected(1)))
            torch.testing.assert_close(tensors[2], torch.full((2, 2), expected(2) * bagua.get_world_size()))
        assert backend.wait_pending_comm_ops() == 0
        second.clear_ops()
        for tensor in tensors:
            tensor.bagua_mark_communication_ready()
        backend.wait_pending_comm_ops()
        assert order == ["first"]


@scenario
def closures():
    box = {"tensor": torch.zeros(4)}
    tensor = nn.Parameter(torch.ones(4))
    assert not tensor.is_bagua_tensor() and not hasattr(tensor, "bagua_tensor_name")
    result = tensor.ensure_bagua_tensor(
        "proxy",
        "closures",
        getter_closure=lambda one: box["tensor"],
        setter_closure=lambda one, other: box.update(tensor=other),
    )
    assert result is tensor and tensor.is_bagua_tensor()
    assert tensor.bagua_tensor_name == "proxy" and tensor.bagua_module_name == "closures"
    assert tensor.bagua_getter_closure() is box["tensor"]
    assert tensor.bagua_backend_tensor().data_ptr() == box["tensor"].data_ptr()
    assert tensor.ensure_bagua_tensor().bagua_tensor_name == "proxy"  # without arguments nothing changes
    storage = torch.arange(10.0)
    tensor.bagua_set_storage(storage.untyped_storage(), 3)
    assert box["tensor"].tolist() == [3.0, 4.0, 5.0, 6.0] and tensor.tolist() == [1.0] * 4
    tensor.bagua_setter_closure(torch.full((4,), 7.0))
    assert tensor.bagua_getter_closure().tolist() == [7.0] * 4

    view = tensor.to_bagua_tensor("view")
    assert view.is_bagua_tensor() and view.data_ptr() == tensor.data_ptr() and tensor.bagua_tensor_name == "proxy"
    plain = torch.zeros(2, 2).ensure_bagua_tensor("plain")
    with warnings.catch_warnings():  # torch's typed storages are deprecated
        warnings.simplefilter("ignore")
        plain.bagua_set_storage(storage.storage(), 2)
    assert plain.tolist() == [[2.0, 3.0], [4.0, 5.0]]

    assert tensor.grad is None and tensor.bagua_ensure_grad() is tensor and tensor.grad.tolist() == [0.0] * 4
    double = torch.zeros(2).double().ensure_bagua_tensor("double")
    for error, words, call in (
        (TypeError, "no gradient", lambda: torch.zeros(3).bagua_ensure_grad()),
        (TypeError, "ensure_bagua_tensor", lambda: torch.zeros(3).bagua_getter_closure()),
        (ValueError, "module_name", plain.bagua_mark_communication_ready),
        (BaguaError, "no bucket", tensor.bagua_mark_communication_ready),
        (ValueError, "getter_closure", lambda: tensor.ensure_bagua_tensor("x", setter_closure=lambda one, other: None)),
        (ValueError, "no tensors", lambda: BaguaBucket([], "empty", flatten=True)),
        (TypeError, "one dtype", lambda: BaguaBucket([plain, double], "mixed", flatten=True)),
        (BaguaError, "belongs to no model", lambda: BaguaBucket([plain], "alone", flatten=True)
            .append_centralized_synchronous_op().start()),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


@scenario
def backend_tensors_on_communicators():
    tensor = torch.full((4,), float(bagua.get_rank()))
    communicator = bagua.communication._get_default_group().get_global_communicator()
    communicator.allreduce_inplace(tensor.ensure_bagua_tensor().bagua_backend_tensor(), bagua.ReduceOp.SUM)
    assert tensor.tolist() == [sum(range(bagua.get_world_size()))] * 4


@scenario
def copies_and_pickles_carry_no_registration():
    model = net()
    held = {"model": model, "lock": io}  # what can't be pickled
    for name, parameter in model.named_parameters():
        parameter.ensure_bagua_tensor(name, "copies", getter_closure=lambda one, held=held: one.grad)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        for parameter, mine in zip(other.parameters(), model.parameters(), strict=True):
            assert not parameter.is_bagua_tensor() and mine.is_bagua_tensor()
            assert torch.equal(parameter, mine)
    plain = torch.zeros(3).ensure_bagua_tensor("plain", getter_closure=lambda one, held=held: one)
    assert not copy.deepcopy(plain).is_bagua_tensor() and not copy.copy(plain).is_bagua_tensor()


@scenario
def registered_tensors_go_away():
    tensors = registered("gone", (3,), (4,))
    bucket = BaguaBucket(tensors, "gone", flatten=True).append_centralized_synchronous_op()
    backend = bagua.get_backend("gone")
    backend.register_ordered_buckets([bucket])
    for tensor in tensors:
        tensor.bagua_mark_communication_ready()
    backend.wait_pending_comm_ops()
    watched = [weakref.ref(bucket), weakref.ref(backend), weakref.ref(tensors[0])]
    del bucket, backend, tensors, tensor
    gc.collect()
    assert [one() for one in watched] == [None] * 3
