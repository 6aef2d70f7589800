"""Models whose parts lie on different ranks, under the path of the original."""

from bagua.torch_api.model_parallel import moe

__all__ = ["moe"]
