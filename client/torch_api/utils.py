"""Helpers under the path of the original: ``compat.utils``."""

from bagua.torch_api.compat.utils import (
    BAGUA_DTYPES,
    MOST_ROUNDS,
    WARM_UP_SHARE,
    StatisticalAverage,
    apply_flattened_call,
    apply_flattened_call_all,
    average_by_removing_extreme_values,
    check_contiguous,
    flatten,
    get_flattened_tensor,
    to_bagua_datatype,
    unflatten,
)

__all__ = [
    "BAGUA_DTYPES",
    "MOST_ROUNDS",
    "WARM_UP_SHARE",
    "StatisticalAverage",
    "apply_flattened_call",
    "apply_flattened_call_all",
    "average_by_removing_extreme_values",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "to_bagua_datatype",
    "unflatten",
]
