"""Values of programs as plain data and tensors, so that other ranks get them without pickle."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict
from typing import Any

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.shards import divisions, empty_shard, is_shard, local_part, with_part

_TENSORS = ("tensor", "shard")
_PLAIN = (bool, int, float, str, type(None))
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_KINDS_OF_MAPPINGS = {made: kind for kind, made in _MAPPINGS.items()}


def encode(value: Any, tensors: list[torch.Tensor], shards: bool = True) -> Any:
    """``value`` as data for JSON; tensors in it go to ``tensors``. Raises TypeError for anything else, and for parts of
    sharded tensors without ``shards``."""
    if isinstance(value, torch.Tensor):
        if is_shard(value) and not shards:
            raise TypeError(
                "a part of a sharded tensor belongs into the model, or into an optimizer of with_bagua [BG408]"
            )
        tensors.append(local_part(value))
        on_device = value.device.type != "cpu"
        content = [str(value.dtype).removeprefix("torch."), list(value.shape), on_device]
        return {"shard": [*content, divisions(value)]} if is_shard(value) else {"tensor": content}
    value = _plain_number(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item, tensors, shards) for item in value]}
    if isinstance(value, dict):
        kind = _KINDS_OF_MAPPINGS.get(type(value), "dict")
        return {kind: [[encode(key, tensors), encode(item, tensors, shards)] for key, item in value.items()]}
    raise TypeError(f"a {type(value).__name__} can't be sent to other ranks [BG408]")


def _plain_number(value: Any) -> Any:
    """A number of NumPy as one of Python: schedules that NumPy computes leave them in optimizers."""
    numpy = sys.modules.get("numpy")  # NumPy is no requirement: without it no value is one of its numbers
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def with_plain_numbers(value: Any) -> Any:
    """``value`` with numbers of Python in place of NumPy's, also inside dictionaries, lists and tuples. Containers that
    hold none stay the same objects."""
    if isinstance(value, dict):
        items = {key: with_plain_numbers(item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        changed = copy.copy(value)  # of its own class, with its attributes
        for key, item in items.items():  # update() of a Counter adds
            changed[key] = item
        return changed
    if type(value) in (list, tuple):
        found = [with_plain_numbers(item) for item in value]
        return value if all(new is old for new, old in zip(found, value, strict=True)) else type(value)(found)
    return _plain_number(value)


def decode(document: Any, tensors: list[torch.Tensor], like: torch.Tensor | None = None) -> Any:
    """The opposite of ``encode``: tensors are made, to be filled later, and added to ``tensors``.

    Those of the shape of ``like`` get its strides. Those of a device come to that of ``like``, as parameters lie there.
    """
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    if kind in _TENSORS:
        made = _new_tensor(content, like) if like is None or kind == "tensor" else _new_shard(content, like)
        tensors.append(local_part(made))
        return made
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key, tensors, like): decode(item, tensors, like) for key, item in content})
    items = [decode(item, tensors, like) for item in content]
    return tuple(items) if kind == "tuple" else items


def tensor_paths(document: Any) -> list[tuple[str, ...]]:
    """The keys that lead to each tensor of what ``encode`` returned, in the order in which it added them."""
    if not isinstance(document, dict):
        return []
    ((kind, content),) = document.items()
    if kind in _TENSORS:
        return [()]
    pairs = content if kind in _MAPPINGS else enumerate(content)
    return [(str(key), *path) for key, item in pairs for path in tensor_paths(item)]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BaguaError(f"Another rank sent a tensor of unknown dtype {name!r}. [BG504]")
    return found


def _new_shard(content: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor that is divided over the mesh of the parameter whose state it is, and as that where it has its shape:
    an optimizer's factors have other ones."""
    dtype, shape, _, divided = content
    if list(like.shape) == shape and divisions(like) == divided:
        made: torch.Tensor = with_part(torch.empty_like(local_part(like), dtype=_dtype(dtype)).detach(), like)
        return made
    return empty_shard(like, shape, _dtype(dtype), divided)


def _new_tensor(content: Any, like: torch.Tensor | None) -> torch.Tensor:
    dtype = _dtype(content[0])
    _, sizes, on_device = content
    where = like.device if like is not None and on_device else torch.device("cpu")
    shape = torch.Size(sizes)
    if like is not None and like.shape == shape and not is_shard(like):
        return torch.empty_like(like, dtype=dtype, device=where).detach()
    return torch.empty(shape, dtype=dtype, device=where)
