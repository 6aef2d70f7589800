"""The wrapped model under the path of the original: ``compat.model``."""

from bagua.torch_api.compat.model import BaguaDistributedDataParallel

__all__ = ["BaguaDistributedDataParallel"]
