"""Classes and hooks that programs written for the original construct, call or override: its arguments, in its order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from bagua.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl, QAdamOptimizer
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.data_parallel import (
    BaguaDistributedDataParallel,
    DistributedDataParallel,
    DistributedDataParallel_V1_9_0,
    functional,
    to_bagua_process_group,
)
from bagua.torch_api.utils import StatisticalAverage, apply_flattened_call, flatten, unflatten

REQUIRED = inspect.Parameter.empty
GRADIENTS = {"hierarchical": False, "average": True}
BYTES = {"hierarchical": True, "average": True}
DECENTRALIZED = {"hierarchical": True, "peer_selection_mode": "all", "communication_interval": 1}
RING = {"hierarchical": True, "communication_interval": 1}
QADAM = {"q_adam_optimizer": REQUIRED, "hierarchical": True}
ASYNC = {"peer_selection_mode": "all", "sync_interval_ms": 500, "warmup_steps": 0}
GROUP = {"process_group": REQUIRED}
DDP = {
    **{"module": REQUIRED, "device_ids": None, "output_device": None, "dim": 0, "broadcast_buffers": True},
    **{"process_group": None, "bucket_cap_mb": 25, "find_unused_parameters": False, "check_reduction": False},
    **{"gradient_as_bucket_view": True, "optimizers": [], "algorithm": "GradientAllReduceAlgorithm()"},
}
SIGNATURES: list[tuple[Any, dict[str, Any]]] = [
    (DistributedDataParallel, DDP),
    (DistributedDataParallel_V1_9_0, DDP),
    (
        BaguaDistributedDataParallel,
        {
            **{"module": REQUIRED, "optimizers": REQUIRED, "algorithm": REQUIRED, "process_group": REQUIRED},
            **{"bagua_module_name": None, "gradient_as_bucket_view": True, "find_unused_parameters": False},
        },
    ),
    (to_bagua_process_group, {"process_group": None}),
    (functional.all_reduce, {"tensor": REQUIRED, "op": "SUM", "group": "WORLD"}),
    (Algorithm.reify, {"self": REQUIRED, **GROUP}),
    (Algorithm.init, {"name": REQUIRED}),
    (GlobalAlgorithmRegistry.register, {"name": REQUIRED, "algorithm": REQUIRED, "description": None}),
    (GlobalAlgorithmRegistry.get, {"name": REQUIRED}),
    (AlgorithmImpl, GROUP),
    (GradientAllReduceAlgorithm, GRADIENTS),
    (GradientAllReduceAlgorithmImpl, GROUP | GRADIENTS),
    (ByteGradAlgorithm, BYTES),
    (ByteGradAlgorithmImpl, GROUP | BYTES),
    (DecentralizedAlgorithm, DECENTRALIZED),
    (DecentralizedAlgorithmImpl, GROUP | DECENTRALIZED),
    (LowPrecisionDecentralizedAlgorithm, RING),
    (LowPrecisionDecentralizedAlgorithmImpl, GROUP | RING),
    (QAdamAlgorithm, QADAM),
    (QAdamAlgorithmImpl, GROUP | QADAM),
    (
        QAdamOptimizer,
        {
            **{"params": REQUIRED, "lr": 1e-3, "warmup_steps": 100, "betas": (0.9, 0.999)},
            **{"eps": 1e-8, "weight_decay": 0.0},
        },
    ),
    (AsyncModelAverageAlgorithm, ASYNC),
    (AsyncModelAverageAlgorithmImpl, GROUP | ASYNC),
    (AsyncModelAverageAlgorithmImpl.abort, {"self": REQUIRED, "bagua_ddp": REQUIRED}),
    (AsyncModelAverageAlgorithmImpl.resume, {"self": REQUIRED, "bagua_ddp": REQUIRED}),
    (BaguaBucket, {"tensors": REQUIRED, "name": REQUIRED, "flatten": REQUIRED, "alignment": 1}),
    (BaguaBucket.append_python_op, {"self": REQUIRED, "python_function": REQUIRED, "group": None}),
    (
        BaguaBucket.append_centralized_synchronous_op,
        {
            **{"self": REQUIRED, "hierarchical": False, "average": True, "scattergather": False},
            **{"compression": None, "group": None},
        },
    ),
    (
        BaguaBucket.append_decentralized_synchronous_op,
        {"self": REQUIRED, "peer_weight": REQUIRED, "hierarchical": True, "peer_selection_mode": "all", "group": None},
    ),
    (
        BaguaBucket.append_low_precision_decentralized_synchronous_op,
        {
            **{"self": REQUIRED, "weight": REQUIRED, "left_peer_weight": REQUIRED, "right_peer_weight": REQUIRED},
            **{"hierarchical": True, "compression": "MinMaxUInt8", "group": None},
        },
    ),
    (
        BaguaBucket.append_asynchronous_model_average_op,
        {"self": REQUIRED, "peer_selection_mode": REQUIRED, "group": None},
    ),
    (flatten, {"tensors": REQUIRED}),
    (unflatten, {"flat": REQUIRED, "tensors": REQUIRED}),
    (apply_flattened_call, {"bucket": REQUIRED, "call": REQUIRED, "extra_args": None}),
    (StatisticalAverage.record, {"self": REQUIRED, "val": REQUIRED}),
    (
        bagua.BaguaModule.with_bagua,
        {"self": REQUIRED, "optimizers": REQUIRED, "algorithm": REQUIRED, "process_group": None, "do_flatten": True},
    ),
    (
        bagua.BaguaTensor.ensure_bagua_tensor,
        {"self": REQUIRED, "name": None, "module_name": None, "getter_closure": None, "setter_closure": None},
    ),
    (bagua.BaguaTensor.bagua_set_storage, {"self": REQUIRED, "storage": REQUIRED, "storage_offset": 0}),
]
HOOKS = {
    "need_reset": "self",
    "init_tensors": "self bagua_ddp",
    "tensors_to_buckets": "self tensors do_flatten",
    "init_operations": "self bagua_ddp bucket",
    "init_forward_pre_hook": "self bagua_ddp",
    "init_backward_hook": "self bagua_ddp",
    "init_post_backward_hook": "self bagua_ddp",
    "init_post_optimizer_step_hook": "self bagua_ddp",
}


def subclasses(kind: type) -> list[type]:
    return [kind, *(lower for direct in kind.__subclasses__() for lower in subclasses(direct))]


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_arguments_of_the_original(function: Any, wanted: dict[str, Any]) -> None:
    """Ours may have more, behind those; an argument that it demands may be optional here, not the other way."""
    found = inspect.signature(function).parameters
    assert list(found)[: len(wanted)] == list(wanted)
    for name, default in wanted.items():
        parameter = found[name]
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, name
        if default is REQUIRED:
            continue
        assert parameter.default is not REQUIRED, f"{name} must not be demanded"
        if name not in ("op", "group", "optimizers", "algorithm"):
            assert parameter.default == default, name
    assert all(
        parameter.default is not REQUIRED or parameter.kind is parameter.VAR_KEYWORD
        for name, parameter in found.items()
        if name not in wanted
    )


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_take_the_arguments_by_the_names_of_the_original(hook: str) -> None:
    """Subclasses call ``super().init_operations(bagua_ddp=…, bucket=…)``."""
    kinds = [kind for kind in subclasses(AlgorithmImpl) if kind.__module__.startswith("bagua.")]
    assert len(kinds) > 10
    for kind in kinds:
        assert " ".join(inspect.signature(getattr(kind, hook)).parameters) == HOOKS[hook], kind
