"""Toolbox beside the exchange of gradients. ``bagua.missing`` names the parts of the original's that do not exist yet."""

from typing import NoReturn

from bagua import missing
from bagua.torch_api.data.elastic_sampler import ElasticSampler

__all__ = ["ElasticSampler"]


def __getattr__(name: str) -> NoReturn:
    words = missing.explain(f"{__name__}.{name}")
    raise AttributeError(words or f"module {__name__!r} has no attribute {name!r}")
