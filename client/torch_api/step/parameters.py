"""Finds a model's trained parameters and shared buffers, and describes them to the other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.shards import is_shard, local_part
from bagua.torch_api.comm.transfer import DTYPES

IGNORE_LISTS = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """Names that the module's ignore lists hold; ".w" means the same as "w"."""
    found: list[str] = []
    for attribute in IGNORE_LISTS:
        found += getattr(module, attribute, None) or ()
    return frozenset(name.removeprefix(".") for name in found)


def trainable_parameters(module: torch.nn.Module, ignored: frozenset[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters that get gradients, in the order of registration, shared ones once, experts (``.expert``) left out.

    Raises TypeError for those whose gradients can't be exchanged.
    """
    found = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or name in ignored or getattr(parameter, "expert", False):
            continue
        _check(name, parameter)
        found.append((name, parameter))
    _refuse_several_devices(found)
    return found


def _check(name: str, parameter: torch.nn.Parameter) -> None:
    _check_memory("Parameter", name, parameter)
    if parameter.dtype not in DTYPES:
        raise TypeError(
            f"Parameter {name} has dtype {parameter.dtype}, whose gradients can't be reduced: convert it, or "
            f"{_LEFT_OUT} [BG601]"
        )


def _check_memory(what: str, name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError that names the tensor if its elements do not lie in plain memory of this rank's."""
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(
            f"{what} {name} has no shape yet: run one forward pass before with_bagua (under a Trainer: in setup()). "
            "[BG601]"
        )
    if is_shard(tensor):
        tensor = local_part(tensor)
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise TypeError(
            f"{what} {name} is a {type(tensor).__name__}, whose elements with_bagua can't send: make it the same on "
            f"all ranks yourself, and {_LEFT_OUT} [BG601]"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else f"{tensor.layout}"
        raise TypeError(
            f"{what} {name} is no dense tensor ({kind}), and only dense ones can become rank 0's: make it the same on "
            f"all ranks yourself, and {_LEFT_OUT} [BG601]"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        where = "has no memory (device meta)" if tensor.is_meta else f"is on {tensor.device}"
        raise TypeError(
            f"{what} {name} {where}: move the model to the CPU or to a CUDA device before with_bagua (model.to(), or "
            f"model.to_empty() and its weights), or {_LEFT_OUT} [BG601]"
        )


_LEFT_OUT = "put the name into the module's list _bagua_params_and_buffers_to_ignore before with_bagua."


def _refuse_several_devices(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Buckets of all devices would go in one order, and each would wait for the slowest."""
    for name, parameter in parameters:
        first, other = parameters[0][1].device, parameter.device
        if other != first:
            raise TypeError(
                f"Parameter {parameters[0][0]} is on {first} and {name} on {other}: with_bagua() trains a model on one "
                "device. Move it there, or put the names of some into _bagua_params_and_buffers_to_ignore and wrap the "
                "parts as models of their own. [BG601]"
            )


def with_sparse_gradients(module: torch.nn.Module) -> set[torch.Tensor]:
    """Parameters of embeddings that are told to have sparse gradients."""
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    return {child.weight for child in module.modules() if isinstance(child, kinds) and child.sparse}


def refuse_changed(name: str, parameter: torch.Tensor, wrapped: torch.Tensor) -> None:
    """Raises BaguaError if the parameter is unlike ``wrapped``, its place in a bucket, in shape, dtype or device."""
    if parameter.shape != wrapped.shape or parameter.dtype != wrapped.dtype or parameter.device != wrapped.device:
        raise BaguaError(
            f"Parameter {name} was {wrapped.dtype} {list(wrapped.shape)} when the model was wrapped, and is "
            f"{parameter.dtype} {list(parameter.shape)} on {parameter.device} now: wrap the model again after such a "
            "change, on all ranks (under a Trainer: change it before fit). [BG602]"
        )


def shared_state(module: torch.nn.Module, ignored: frozenset[str]) -> list[tuple[str, torch.Tensor]]:
    """Returns all parameters (also frozen ones) and buffers that every rank must begin with alike, each once. Raises
    TypeError for those that can't be sent."""
    found = []
    for what, named in (("Parameter", module.named_parameters()), ("Buffer", module.named_buffers())):
        for name, tensor in named:
            if name not in ignored and not getattr(tensor, "expert", False):
                _check_memory(what, name, tensor)
                found.append((name, tensor))
    return found


def describe(
    state: Sequence[tuple[str, torch.Tensor]],
    trained: Iterable[str],
    optimizers: Sequence[torch.optim.Optimizer],
    settings: dict[str, object],
) -> dict[str, object]:
    """Returns all that must agree between ranks, as plain data."""
    names = set(trained)
    return {
        "tensors": [
            [name, _kind(tensor), list(tensor.shape), list(tensor.stride()), name in names] for name, tensor in state
        ],
        "optimizers": describe_optimizers(optimizers),
        "settings": settings,
    }


def describe_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[object]:
    """[class, [parameters in each group]] of each."""
    return [[type(one).__name__, [len(group["params"]) for group in one.param_groups]] for one in optimizers]


def _kind(tensor: Any) -> str:
    """Its dtype, where it lies if not on the CPU, and how it is divided among the ranks of an island."""
    dtype, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
    found = dtype if device == "cpu" else f"{dtype} on {device}"
    if not is_shard(tensor):
        return found
    return f"{found} divided as {tensor.placements} over {list(tensor.device_mesh.shape)} ranks"


def canonical(description: dict[str, object]) -> bytes:
    """Returns the same bytes for the same description."""
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def first_difference(descriptions: Sequence[dict[str, object]], island_size: int = 1) -> str:
    """Says, for people, where the first rank that differs from rank 0 does so. Empty if none differs."""
    failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(descriptions) if "error" in one]
    if failed:
        return f"The model can't be wrapped. {'; '.join(failed)}"
    for rank, other in enumerate(descriptions):
        text = _difference(
            descriptions[0], other, rank if island_size == 1 else f"{rank} of island {rank // island_size}"
        )
        if text:
            return text
    return ""


def _difference(mine: dict[str, object], other: dict[str, object], rank: int | str) -> str:
    left, right = mine["tensors"], other["tensors"]
    assert isinstance(left, list) and isinstance(right, list)
    for index in range(max(len(left), len(right))):
        here = left[index] if index < len(left) else None
        there = right[index] if index < len(right) else None
        if here != there:
            return (
                f"The ranks' models differ. The first difference is parameter or buffer number {index}: rank 0 has "
                f"{_say(here, there)}, rank {rank} has {_say(there, here)}. Build the same model, with the same layers "
                "in the same order, on every rank."
            )
    if mine["optimizers"] != other["optimizers"]:
        return (
            f"The ranks' optimizers differ: rank 0 has {mine['optimizers']}, rank {rank} has {other['optimizers']}. "
            "Make the same ones on every rank."
        )
    if mine["settings"] != other["settings"]:
        return (
            f"The ranks' settings differ: rank 0 has {mine['settings']}, rank {rank} has {other['settings']}. "
            "Choose the same on every rank."
        )
    return ""


def _say(entry: list[object] | None, other: list[object] | None) -> str:
    if entry is None:
        return "none"
    name, dtype, shape, stride, trained = entry
    text = f"{name} {dtype} {shape}"
    if other is not None and entry[:3] == other[:3]:
        text += f" with strides {stride}, {'trained' if trained else 'not trained'}"
    return text


def check_descriptions(texts: Sequence[bytes], island_size: int = 1) -> None:
    """Raises BaguaError, on every rank the same, if the ranks' descriptions differ."""
    if all(text == texts[0] for text in texts) and b'"error"' not in texts[0]:
        return
    difference = first_difference([json.loads(text) for text in texts], island_size)
    if difference:
        raise BaguaError(f"{difference} [BG603]")
