"""Plans, the registry, and what an algorithm answers."""

import pytest
import torch

from bagua.algorithms import Algorithm, AllReduce, Codec, Local, Plan


class Bucket:
    name = "0"
    tensors = ()

    def __init__(self):
        self.plan = None

    def set_plan(self, plan):
        self.plan = plan


class TwoHosts:
    hosts = ((0,), (1,))


class Model:
    """A wrapped model as an algorithm sees it."""

    def bagua_build_params(self):
        return list(torch.nn.Linear(2, 2).named_parameters())

    def mark_ready(self, name, parameter): ...

    def finish_backward(self): ...


@pytest.mark.parametrize(
    ("codec", "wanted"),
    [
        (None, None),
        ("none", None),
        (Codec("none"), None),
        ("minmax8", Codec("minmax8", error_feedback=False)),
        ("topk", Codec("topk", density=0.01, error_feedback=True)),
        (Codec("onebit", error_feedback=False), Codec("onebit", None, False)),
    ],
)
def test_codec_of_an_algorithm(codec, wanted):
    bucket = Bucket()
    Algorithm.init("gradient_allreduce", codec=codec).reify(None).init_operations(Model(), bucket)
    assert bucket.plan == Plan((AllReduce("AVG", codec=wanted),))


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("async", "warmup_steps"),
        ("diloco", "warmup_steps"),
        ("local_sgd", "warmup_steps"),
        ("no_loco", "warmup_steps"),
        ("power_sgd", "start_after"),
        ("streaming_diloco", "warmup_steps"),
        ("top_k", "warmup_steps"),
    ],
)
def test_warm_up_is_an_all_reduce_with_a_codec_of_its_own(name, steps):
    for codec, wanted in ((None, None), ("minmax8", Codec("minmax8"))):
        bucket = Bucket()
        algorithm = Algorithm.init(name, **{steps: 3, "warmup_codec": codec})
        algorithm.reify(TwoHosts()).init_operations(Model(), bucket)
        assert bucket.plan == Plan((AllReduce("AVG", codec=wanted),))
    with pytest.raises(ValueError, match=f"warmup_codec without {steps} makes no sense"):
        Algorithm.init(name, warmup_codec="minmax8")
    with pytest.raises(ValueError, match="no codec 'zip'"):
        Algorithm.init(name, **{steps: 3, "warmup_codec": "zip"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AllReduce("MAX"), "SUM, AVG"),
        (lambda: Plan(()), "at least one step"),
        (lambda: Plan(("allreduce",)), "step"),
        (lambda: Plan((AllReduce(dst="gradient"),)), "contributions stay"),
        (lambda: Plan((AllReduce(src="fresh"),)), "Local steps read it"),
        (lambda: Plan((AllReduce(), Local(print, reads=("fresh",)))), "Step 1 .* before the first other step"),
        (lambda: Plan((Local(print, writes=("fresh",)), AllReduce())), "Step 0"),
        (lambda: AllReduce(everywhere=True), "needs a codec"),
        (lambda: AllReduce(over="mars"), "choose one of everyone, host, leaders"),
    ],
)
def test_plans_that_do_not_fit_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
