"""Rules: which optimizers, groups and parameters can be fused. Each says in words why not."""

from __future__ import annotations

from typing import Any

import torch

from bagua.torch_api.step.bucket import is_dense
from bagua.torch_api.train.optimizer_code import home_of_step

# TensorIterator's grain. Below it an operation runs in one piece on one thread, as it does on a small parameter alone.
SERIAL_ELEMENTS = 32767
CACHED_ELEMENTS = 131072  # a block on one thread: more would leave the cache between the kernels of one step
# Elements of a parameter on the CPU above which a kernel call of its own costs little beside its work.
LARGEST = SERIAL_ELEMENTS // 2

# A row of fewer bytes fills no two vectors of any processor. So torch's loops take it element by element, and rows of
# different lengths below this get the same bits.
TINY_BYTES = 32

_NOT_ELEMENTWISE = {
    "LBFGS": "LBFGS flattens all parameters itself, and calls its closure several times",
    "SparseAdam": "SparseAdam works on sparse gradients, which have no place in a flat tensor",
    "Adafactor": "Adafactor takes means over the rows and columns of each parameter",
    "Muon": "Muon orthogonalises each matrix",
}
ALONE = "no other parameter of its size, dtype and kind of state shares its group"


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer's step treats each element by itself, as far as is known: torch's own, or a class that says
    so."""
    told = getattr(optimizer, "elementwise", None)
    if told is not None:
        return bool(told)
    return home_of_step(optimizer).startswith("torch.optim")


def calls_closure_once(optimizer: torch.optim.Optimizer) -> bool:
    """True if the step calls its closure once, before all else."""
    return home_of_step(optimizer).startswith(("torch.optim", "bagua.algorithms"))


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Says why no parameter of this optimizer can be fused now; empty if some may be."""
    for name, words in _NOT_ELEMENTWISE.items():
        known = getattr(torch.optim, name, None)  # older versions of torch lack some classes
        if known is not None and isinstance(optimizer, known):
            return words
    if getattr(optimizer, "elementwise", None) is False:
        return f"{type(optimizer).__name__}.elementwise says that its step does not treat each element by itself"
    return ""


def refuse_group(group: dict[str, Any]) -> str:
    """Says why no parameter of this group can be fused; empty if some may be."""
    if group.get("differentiable"):
        return "differentiable=True keeps the history of each parameter's step"
    if group.get("fused"):
        return "fused=True: torch's own kernel steps all parameters in one call already"
    return ""


def refuse_parameter(parameter: torch.Tensor, state: dict[str, Any], stepped: bool) -> str:
    """Says why this parameter can't be fused; empty if it can. ``stepped``: it has made a step, so that its state
    is there.
    """
    if not parameter.requires_grad:
        return "it is frozen"
    if not state and not stepped:
        return "it has not made a step yet: the first one, which makes its state, is the plain one"
    if parameter.layout is not torch.strided or parameter.dim() == 0 or parameter.numel() == 0:
        return "it is no dense tensor with elements and dimensions"
    if not (parameter.is_floating_point() or parameter.is_complex()) or not is_dense(parameter):
        return "its elements don't lie without gaps"
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
        return f"it is a {type(parameter).__name__}, whose memory is not its own"
    if parameter.device.type == "cpu" and parameter.numel() > LARGEST:
        return f"it has more than {LARGEST} elements: a kernel call of its own costs little beside its work"
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if not _fits(value, parameter):
                return f"its state {name!r} is a tensor {list(value.shape)}, and the parameter {list(parameter.shape)}"
        elif not isinstance(value, (bool, int, float, str, type(None))):
            return f"its state {name!r} is a {type(value).__name__}"
    return ""


def _fits(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    if value.layout is not torch.strided or value.requires_grad:
        return False
    return value.dim() == 0 or (value.shape == parameter.shape and value.device == parameter.device)


def kind(parameter: torch.Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a key that is equal for parameters that can share a tensor: of one size (tiny ones of any), dtype, device
    and layout of state."""
    states = tuple(
        (name, value.dtype, value.dim() == 0, value.device) if isinstance(value, torch.Tensor) else (name,)
        for name, value in sorted(state.items())
    )
    # The widest of its tensors decides whether a row fills a vector.
    widest = max([parameter.itemsize, *(value.itemsize for value in state.values() if isinstance(value, torch.Tensor))])
    tiny = parameter.numel() * widest < TINY_BYTES
    return 0 if tiny else parameter.numel(), parameter.dtype, parameter.device, states
