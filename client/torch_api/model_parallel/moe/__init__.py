"""Mixture of experts under the path of the original: ``layers.moe``."""

from bagua.torch_api.layers.gating import TopKGate
from bagua.torch_api.layers.moe import Experts, MoE, MOELayer, is_moe_param

__all__ = ["Experts", "MOELayer", "MoE", "TopKGate", "is_moe_param"]
