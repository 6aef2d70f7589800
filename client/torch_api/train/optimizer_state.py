"""State of optimizers as plain data and tensors, so that rank 0's can be broadcast without pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.plain_data import decode, encode, tensor_paths
from bagua.torch_api.comm.shards import is_shard
from bagua.torch_api.job.session import Session
from bagua.torch_api.train.agreement import broadcast_json, broadcast_tensors


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], module: torch.nn.Module) -> None:
    """Raises TypeError if one of them is another object, ConfigError if it has parameters, and none of ``module``: it
    was made for another model, or before this one was copied. Some of others, weights of losses, say, are all right.
    """
    own = set(module.parameters())
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizers holds a {type(optimizer).__name__}: pass a list of torch.optim.Optimizer objects. [BG615]"
            )
        foreign = _parameters(optimizer)
        if not foreign or not own.isdisjoint(foreign):
            continue
        if any(map(is_shard, own)) and not any(map(is_shard, foreign)):
            raise ConfigError(
                f"optimizers[{number}], a {type(optimizer).__name__}, was made before fully_shard put other parameters "
                "into the model: make it afterwards. [BG615]"
            )
        raise ConfigError(
            f"optimizers[{number}], a {type(optimizer).__name__} of {len(foreign)} parameters (the first of shape "
            f"{tuple(foreign[0].shape)}), has no parameter of this model, a {type(module).__name__}: it trains "
            "another one. Make it from model.parameters() of the model that you wrap, after the last copy of it. "
            "An optimizer of copies, such as master weights, is left out of the list. [BG615]"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _encode_states(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor], experts: bool) -> list[Any]:
    return [
        encode(optimizer.state[parameter], tensors)
        if parameter in optimizer.state and getattr(parameter, "expert", False) == experts
        else None
        for parameter in _parameters(optimizer)
    ]


def encode_experts(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Any:
    """Encodes as ``encode_optimizer``, but the state of experts (``.expert``) alone, which each rank has for itself."""
    return {"states": _encode_states(optimizer, tensors, experts=True), "groups": []}


def encode_optimizer(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Any:
    """State by the parameter's position, hyper-parameters of every group, and what an optimizer of the user's keeps
    in ``state`` under names, both as far as they are plain data. Experts (``.expert``) have none: each rank's are
    others."""
    states = _encode_states(optimizer, tensors, experts=False)
    groups = [
        _plain_items({name: value for name, value in group.items() if name != "params"}, tensors)
        for group in optimizer.param_groups
    ]
    state: Mapping[Any, Any] = optimizer.state
    named = {name: value for name, value in state.items() if isinstance(name, str)}
    return {"states": states, "groups": groups, "named": _plain_items(named, tensors)}


def _plain_items(items: Mapping[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    found = {}
    for name, value in items.items():
        try:
            encode(value, [])  # tried with a list that is dropped: half a value must leave no tensors
        except TypeError:  # a function, say: every rank keeps its own
            continue
        found[name] = encode(value, tensors)
    return found


def optimizer_paths(
    optimizer: torch.optim.Optimizer, document: Any, names: Mapping[torch.Tensor, str]
) -> list[tuple[str, ...]]:
    """Keys of the tensors in what ``encode_optimizer`` returned, in the order in which it added them: as in torch's
    ``get_optimizer_state_dict``, by names of parameters."""
    found = []
    for number, (parameter, state) in enumerate(zip(_parameters(optimizer), document["states"], strict=True)):
        name = names.get(parameter, f"parameter {number}")
        found += [("state", name, *path) for path in tensor_paths(state)]
    for number, group in enumerate(document["groups"]):
        found += [("groups", str(number), name, *path) for name, one in group.items() for path in tensor_paths(one)]
    for name, one in document.get("named", {}).items():
        found += [("named", name, *path) for path in tensor_paths(one)]
    return found


def decode_optimizer(optimizer: torch.optim.Optimizer, document: Any, tensors: list[torch.Tensor]) -> None:
    """Takes over what ``encode_optimizer`` returned elsewhere. Tensors are made, and filled later."""
    _decode_states(optimizer, document["states"], tensors, experts=False)
    for group, found in zip(optimizer.param_groups, document["groups"], strict=True):
        for name, value in found.items():
            group[name] = decode(value, tensors, group["params"][0] if group["params"] else None)
    first = next(iter(_parameters(optimizer)), None)
    for name, value in document.get("named", {}).items():  # earlier versions wrote none
        optimizer.state[name] = decode(value, tensors, first)


def decode_experts(optimizer: torch.optim.Optimizer, document: Any, tensors: list[torch.Tensor]) -> None:
    """Takes over what ``encode_experts`` returned earlier. Tensors are made, and filled later."""
    _decode_states(optimizer, document["states"], tensors, experts=True)


def _decode_states(
    optimizer: torch.optim.Optimizer, states: Sequence[Any], tensors: list[torch.Tensor], experts: bool
) -> None:
    for parameter, state in zip(_parameters(optimizer), states, strict=True):
        if getattr(parameter, "expert", False) != experts:
            continue
        if state is None:
            optimizer.state.pop(parameter, None)  # rank 0 has no state for it, and so none has
        else:
            optimizer.state[parameter] = decode(state, tensors, parameter)


def broadcast_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], session: Session, group: Communicator, root: int = 0
) -> None:
    """State and hyper-parameters of the optimizers of rank ``root`` replace everybody's, also where that means none.

    Raises BaguaError, on every rank, for state that is neither tensors nor plain data.
    """
    if not optimizers:
        return
    tensors: list[torch.Tensor] = []
    document: Any = None
    if group.rank() == root:
        try:
            document = {"optimizers": [encode_optimizer(optimizer, tensors) for optimizer in optimizers]}
        except TypeError as error:
            # All must learn it: the others wait for a document.
            document = {"error": f"The state of an optimizer holds what can't be broadcast: {error}. [BG615]"}
    document = broadcast_json(document, group, root)
    if "error" in document:
        raise BaguaError(document["error"])
    if group.rank() != root:
        for optimizer, found in zip(optimizers, document["optimizers"], strict=True):
            decode_optimizer(optimizer, found, tensors)
    broadcast_tensors(tensors, session, group, root)
