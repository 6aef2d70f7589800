"""Types in which the original's programs and its tuning service spoke of tensors and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypedDict


class TensorDtype(StrEnum):
    """Dtypes of gradients."""

    F32 = "f32"
    F16 = "f16"
    U8 = "u8"


BYTES = {TensorDtype.F32: 4, TensorDtype.F16: 2, TensorDtype.U8: 1}


class TensorDeclaration(TypedDict):
    """A tensor, without its elements."""

    name: str
    num_elements: int
    dtype: TensorDtype


def get_tensor_declaration_bytes(td: TensorDeclaration) -> int:
    """Bytes of the tensor's elements. Raises ValueError for an unknown dtype."""
    return td["num_elements"] * BYTES[TensorDtype(td["dtype"])]


@dataclass
class BaguaHyperparameter:
    """Division of tensors into buckets. ``bucket_size``: bytes."""

    buckets: list[list[TensorDeclaration]] = field(default_factory=list)
    bucket_size: int = 0
    is_hierarchical_reduce: bool = False

    def update(self, param_dict: Mapping[str, Any]) -> BaguaHyperparameter:
        """Takes over the values whose names are fields; returns itself."""
        for known in fields(self):
            if known.name in param_dict:
                setattr(self, known.name, param_dict[known.name])
        return self


class BaguaCoreTelemetrySpan(TypedDict):
    """A moment of a tensor in a step. Times: milliseconds."""

    trace_id: int
    action: str
    tensor_name: str
    start_time: int
    end_time: int
