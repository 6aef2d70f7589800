"""Mixture of experts under the path of the original, and of its modules: ``layers.moe``."""

import sys

from bagua.torch_api.layers.gating import TopKGate, gumbel_rsample, multiplicative_jitter
from bagua.torch_api.layers.moe import Experts, MoE, MOELayer, is_moe_param

__all__ = ["Experts", "MOELayer", "MoE", "TopKGate", "gumbel_rsample", "is_moe_param", "multiplicative_jitter"]

for _name in ("experts", "layer", "sharded_moe", "utils"):
    # All module paths of the original lead here.
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
