"""Training of wrapped models equals training of one process on all ranks' batches (training_scenarios/), and programs
written for the original run unchanged: users' algorithms, tensor and bucket methods, DistributedDataParallel
(compat_scenarios/)."""

import compat_scenarios
import pytest
import training_scenarios

from bagua.torch_api.train.model import DistributedModel

SCENARIOS = training_scenarios.SCENARIOS | compat_scenarios.SCENARIOS
# Hosts of the ranks, bytes of a bucket; the contract suite has 4 ranks on one host with large buckets, too.
TRAINING = (([[0], [1, 2]], "3000"), ([[0, 1]], "3000"), ([[0, 1, 2, 3]], ""), ([[0]], "3000"))
COMPAT = (([[0, 1], [2, 3]], "300"), ([[0, 1, 2]], ""), ([[0]], "300"))


def rank_runs(name, bucket_bytes):
    made, init = [], DistributedModel.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedModel, "__init__", lambda self, *_, **__: (init(self, *_, **__), made.append(self))[0])
        if bucket_bytes:
            patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", bucket_bytes)
        SCENARIOS[name]()
    for model in made:
        model.close()  # until then daemons keep connections for it


def cases(layouts, names):
    """The first of the layouts; the others with --full."""
    return [
        pytest.param(*layout, name, marks=pytest.mark.full if number else (), id=f"{layout[0]}-{name}")
        for number, layout in enumerate(layouts)
        for name in names
    ]


@pytest.mark.parametrize(
    ("hosts", "bucket_bytes", "name"),
    cases(TRAINING, training_scenarios.SCENARIOS) + cases(COMPAT, compat_scenarios.SCENARIOS),
)
def test_scenario(pools, hosts, bucket_bytes, name):
    pools(*hosts).run(rank_runs, name=name, bucket_bytes=bucket_bytes)
