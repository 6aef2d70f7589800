"""``bagua.algorithms.diloco`` beside the algorithms of the original."""

from bagua.algorithms.diloco import (
    DiLoCoAlgorithm,
    DiLoCoAlgorithmImpl,
    StreamingDiLoCoAlgorithm,
    StreamingDiLoCoAlgorithmImpl,
)

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl", "StreamingDiLoCoAlgorithm", "StreamingDiLoCoAlgorithmImpl"]
