"""Mixture of experts, as programs reach it: ``bagua.moe.MoE``."""

from bagua.torch_api.layers.moe import MoE, is_moe_param

__all__ = ["MoE", "is_moe_param"]
