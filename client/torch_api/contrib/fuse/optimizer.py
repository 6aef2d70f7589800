"""Names of the original's module of fused optimizers."""

from bagua.torch_api.optim.fuse import fuse_optimizer, fuse_step, is_fused_optimizer
from bagua.torch_api.optim.lanes import calculate_mutual_groups

__all__ = ["calculate_mutual_groups", "fuse_optimizer", "fuse_step", "is_fused_optimizer"]
