"""State of optimizers as plain data and tensors, so that rank 0's can be broadcast without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.join.session import Session
from bagua.torch_api.train.agreement import broadcast_json, broadcast_tensors

_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` as data for JSON; tensors in it go to ``tensors``. Raises TypeError for anything else."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        on_device = value.device.type != "cpu"
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), on_device]}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
    raise TypeError(f"a {type(value).__name__} can't be sent to other ranks")


def decode(document: Any, tensors: list[torch.Tensor], like: torch.Tensor | None = None) -> Any:
    """The opposite of ``encode``: tensors are made, to be filled later, and added to ``tensors``.

    Those of the shape of ``like`` get its strides. Those of a device come to that of ``like``, as parameters lie there.
    """
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    if kind == "tensor":
        dtype = getattr(torch, content[0], None)
        if not isinstance(dtype, torch.dtype):
            raise BaguaError(f"Rank 0 sent a tensor of unknown dtype {content[0]!r}.")
        shape = torch.Size(content[1])
        where = like.device if like is not None and content[2] else torch.device("cpu")
        if like is not None and like.shape == shape:
            made = torch.empty_like(like, dtype=dtype, device=where).detach()
        else:
            made = torch.empty(shape, dtype=dtype, device=where)
        tensors.append(made)
        return made
    if kind == "dict":
        return {decode(key, tensors, like): decode(item, tensors, like) for key, item in content}
    items = [decode(item, tensors, like) for item in content]
    return tuple(items) if kind == "tuple" else items


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _encode_optimizer(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Any:
    """State by the parameter's position, and hyper-parameters of every group as far as they are plain data."""
    states = [
        encode(optimizer.state[parameter], tensors) if parameter in optimizer.state else None
        for parameter in _parameters(optimizer)
    ]
    groups = []
    for group in optimizer.param_groups:
        found = {}
        for name, value in group.items():
            if name == "params":
                continue
            try:
                encode(value, [])
            except TypeError:  # a function, say: every rank keeps its own
                continue
            found[name] = encode(value, tensors)
        groups.append(found)
    return {"states": states, "groups": groups}


def _decode_optimizer(optimizer: torch.optim.Optimizer, document: Any, tensors: list[torch.Tensor]) -> None:
    for parameter, state in zip(_parameters(optimizer), document["states"], strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = decode(state, tensors, parameter)
    for group, found in zip(optimizer.param_groups, document["groups"], strict=True):
        for name, value in found.items():
            group[name] = decode(value, tensors, group["params"][0] if group["params"] else None)


def broadcast_optimizers(optimizers: Sequence[torch.optim.Optimizer], session: Session, group: Communicator) -> None:
    """State and hyper-parameters of rank 0's optimizers replace everybody's, also where that means none.

    Raises BaguaError, on every rank, for state that is neither tensors nor plain data.
    """
    if not optimizers:
        return
    tensors: list[torch.Tensor] = []
    document: Any = None
    if group.rank() == 0:
        try:
            document = {"optimizers": [_encode_optimizer(optimizer, tensors) for optimizer in optimizers]}
        except TypeError as error:
            document = {"error": f"The state of an optimizer holds what can't be broadcast: {error}."}
    document = broadcast_json(document, group)
    if "error" in document:
        raise BaguaError(document["error"])
    if group.rank() != 0:
        for optimizer, found in zip(optimizers, document["optimizers"], strict=True):
            _decode_optimizer(optimizer, found, tensors)
    broadcast_tensors(tensors, session, group)
