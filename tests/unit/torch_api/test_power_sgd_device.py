"""PowerSGD that does not read results on the host, as on a GPU, beside PowerSGD that does."""

import math

import torch

from bagua.algorithms.low_rank import TorchLowRank
from bagua.algorithms.plan import FRESH, RESULT
from bagua.algorithms.power_sgd import LEFT, RIGHT, PowerSGDAlgorithm, PowerSGDAlgorithmImpl, _Compressed


class Bucket:
    """One matrix and one vector, with slots for one rank."""

    dtype = torch.float32

    def __init__(self):
        self.tensors = [torch.zeros(24, 18), torch.zeros(7)]
        self.names = ["matrix", "vector"]
        self.low_rank = TorchLowRank()
        self.slots = {FRESH: torch.zeros(24 * 18 + 7), RESULT: torch.zeros(24 * 18 + 7)}

    def slot(self, name):
        return self.slots[name]

    def views(self, name):
        parts = self.slots[name].split([24 * 18, 7])
        return [parts[0].view(24, 18), parts[1]]


def results(looks):
    """Of five steps, the third of which has an infinite gradient."""
    settings = PowerSGDAlgorithm()
    implementation = PowerSGDAlgorithmImpl(None, settings)
    bucket = Bucket()
    compressed = _Compressed(bucket, settings, implementation._state_of)
    compressed.looks = looks
    bucket.slots |= {LEFT: torch.zeros(compressed.left_elements), RIGHT: torch.zeros(compressed.right_elements)}
    found = []
    for step in range(5):
        gradient = torch.randn(24 * 18 + 7, generator=torch.Generator().manual_seed(step))
        if step == 2:
            gradient[100] = math.inf
        bucket.slot(FRESH).copy_(gradient)
        for work in (compressed.project, compressed.back_project, compressed.restore):
            work(bucket)
        found.append(bucket.slot(RESULT).clone())
    return found


def test_the_same_results_without_looking():
    for step, (blind, seeing) in enumerate(zip(results(False), results(True), strict=True)):
        assert torch.equal(blind.isnan(), seeing.isnan()) and bool(blind[: 24 * 18].isnan().all()) == (step == 2)
        assert torch.equal(blind.nan_to_num(), seeing.nan_to_num())
