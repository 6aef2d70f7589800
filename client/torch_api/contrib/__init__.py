"""Toolbox beside the exchange of gradients. ``bagua.missing`` names the original's parts that do not exist yet."""

from typing import NoReturn

from bagua import missing
from bagua.torch_api.data.elastic_sampler import ElasticSampler
from bagua.torch_api.data.learning_rate import scale_lr

__all__ = ["ElasticSampler", "scale_lr"]


def __getattr__(name: str) -> NoReturn:
    words = missing.explain(f"{__name__}.{name}")
    raise AttributeError(words or f"module {__name__!r} has no attribute {name!r}")
