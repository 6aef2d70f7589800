"""``bagua.algorithms.no_loco`` beside the algorithms of the original."""

from bagua.algorithms.no_loco import NoLoCoAlgorithm, NoLoCoAlgorithmImpl

__all__ = ["NoLoCoAlgorithm", "NoLoCoAlgorithmImpl"]
