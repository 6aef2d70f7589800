"""A module of the original's: see ``bagua.torch_api.layers``."""

from bagua.torch_api.layers.gating import gumbel_rsample, multiplicative_jitter
from bagua.torch_api.model_parallel.moe import MOELayer, TopKGate

__all__ = ["MOELayer", "TopKGate", "gumbel_rsample", "multiplicative_jitter"]
