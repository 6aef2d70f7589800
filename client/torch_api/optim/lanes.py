"""Tensors, one of each parameter, as the rows of one tensor: shared memory, or a copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from bagua.torch_api.step.bucket import view_like

ALIGNMENT = 64  # bytes


class Lane:
    """Memory for rows. ``flat``: (rows, elements of the largest parameter); what is left of a row is nobody's.
    ``rows``: the same memory in the parameters' shapes and strides. ``gap``: rows lie apart.

    The gap keeps torch from seeing one long row; one operand with gaps is enough. So an operation runs over each row as
    it would over the parameter alone, with the same vectors and the same rest. Its bits are the same also where
    vectorised code rounds differently (bfloat16, pow).
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device, gap: bool = True
    ) -> None:
        self._length = max(one.numel() for one in parameters)
        self._even = all(one.numel() == self._length for one in parameters)
        self._contiguous = all(one.is_contiguous() for one in parameters)
        self._strides = [parameter.stride() for parameter in parameters]
        whole = ALIGNMENT // dtype.itemsize
        stride = (self._length // whole + 1) * whole if gap else self._length
        memory = torch.zeros(len(parameters) * stride, dtype=dtype, device=device)
        self.flat = memory.as_strided((len(parameters), self._length), (stride, 1))
        self.rows = [view_like(memory, number * stride, one) for number, one in enumerate(parameters)]
        self.storage = memory.untyped_storage().data_ptr()
        self._stack: torch.Tensor | None = None  # the rows, if they are contiguous and of one shape
        shape = parameters[0].shape
        if not gap and all(one.shape == shape and one.is_contiguous() for one in parameters):
            self._stack = memory.view(len(parameters), *shape)

    def fill(self, tensors: Sequence[torch.Tensor], begin: int = 0) -> None:
        """Values of ``tensors``, of the parameters' shapes, go to the rows from ``begin`` on."""
        if self._stack is not None and tensors[0].dtype == self._stack.dtype:
            torch.stack(list(tensors), out=self._stack[begin : begin + len(tensors)])  # faster than copies
        else:
            torch._foreach_copy_(self.rows[begin : begin + len(tensors)], list(tensors))

    def spread(self, tensors: Sequence[torch.Tensor], begin: int = 0) -> None:
        """Values of the rows from ``begin`` on go to ``tensors``."""
        torch._foreach_copy_(list(tensors), self.rows[begin : begin + len(tensors)])

    def seen(
        self, tensors: Sequence[torch.Tensor], begin: int = 0, places: list[int] | None = None
    ) -> torch.Tensor | None:
        """``tensors`` as rows of one tensor, without a copy: their memory lies at equal distances, in the strides of
        the parameters from ``begin`` on. None where it does not, and where sizes differ: what lies behind a smaller one
        may be somebody's. ``places``: their addresses, if they are known."""
        if not self._even:
            return None
        first, size, rows = tensors[0], tensors[0].element_size(), len(tensors)
        begins = first.data_ptr()
        distance = tensors[1].data_ptr() - begins if rows > 1 else self._length * size
        ends = begins + distance * rows
        if distance < self._length * size or distance % size or tensors[-1].data_ptr() != ends - distance:
            return None
        # Cheapest first: the ends, then all.
        if (places or list(map(torch.Tensor.data_ptr, tensors))) != list(range(begins, ends, distance)):
            return None
        storage = first.untyped_storage()
        if ends - distance + self._length * size > storage.data_ptr() + storage.nbytes():
            return None  # neighbours by chance
        if [one.dtype for one in tensors].count(first.dtype) < rows or not self._fit(tensors, begin):
            return None
        offset = (begins - storage.data_ptr()) // size
        return first.detach().as_strided((rows, self._length), (distance // size, 1), offset)

    def _fit(self, tensors: Sequence[torch.Tensor], begin: int) -> bool:
        """True if the tensors have the strides of their parameters."""
        if self._contiguous:
            return all(map(torch.Tensor.is_contiguous, tensors))
        return [one.stride() for one in tensors] == self._strides[begin : begin + len(tensors)]


def addresses(tensors: Sequence[torch.Tensor | None]) -> list[int] | None:
    """Returns the addresses of tensors. None if one is missing, or is not dense: to ask for the address is the cheapest
    way to learn that.
    """
    try:
        return list(map(torch.Tensor.data_ptr, tensors))  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None


def lies_alone(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory holds nothing else, and no other process sees it."""
    if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def calculate_mutual_groups(tensors_list: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Indices of tensors that lie behind one another without a gap in every list: runs of two or more that all lists
    have, each in the order of addresses. Raises ValueError for lists of unequal length."""
    if len({len(tensors) for tensors in tensors_list}) > 1:
        raise ValueError(
            f"The lists have {[len(tensors) for tensors in tensors_list]} tensors: as many in each. [BG609]"
        )
    found = [_neighbours(tensors) for tensors in tensors_list]
    return [run for run in found[0] if all(run in others for others in found)] if found else []


def _neighbours(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    places = sorted((one.untyped_storage().data_ptr(), one.data_ptr(), index) for index, one in enumerate(tensors))
    runs = [[place[-1]] for place in places[:1]]
    for (storage, place, index), (other, following, behind) in itertools.pairwise(places):
        one: Any = tensors[index]
        if storage == other and place + one.numel() * one.element_size() == following:
            runs[-1].append(behind)
        else:
            runs.append([behind])
    return [run for run in runs if len(run) > 1]
