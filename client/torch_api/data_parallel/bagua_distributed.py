"""The wrapped model under the path of the original: ``train.model``."""

from bagua.torch_api.train.model import BaguaDistributedDataParallel

__all__ = ["BaguaDistributedDataParallel"]
