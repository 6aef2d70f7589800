"""``bagua.algorithms.bytegrad`` under the path of the original."""

from bagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]
