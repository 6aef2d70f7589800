"""Plans, the registry, and what an algorithm answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua.algorithms import (
    Algorithm,
    AlgorithmImpl,
    AllReduce,
    BucketLayout,
    Codec,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    Local,
    Plan,
)
from bagua.algorithms.base import AlgorithmRegistry
from bagua.algorithms.codec import NAMES


class Bucket:
    name = "0"
    tensors = ()

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def set_plan(self, plan: Plan) -> None:
        self.plan = plan


class TwoHosts:
    hosts = ((0,), (1,))


class Model:
    """A wrapped model as an algorithm sees it."""

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(torch.nn.Linear(2, 2).named_parameters())

    def mark_ready(self, name: str, parameter: torch.nn.Parameter) -> None: ...

    def finish_backward(self) -> None: ...


@pytest.mark.parametrize(("average", "op"), [(True, "AVG"), (False, "SUM")])
def test_gradient_allreduce_is_one_step(average: bool, op: str) -> None:
    bucket = Bucket()
    GradientAllReduceAlgorithm(average=average).reify(None).init_operations(Model(), bucket)
    assert bucket.plan == Plan((AllReduce(op, src="gradient", dst="result"),))


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
def test_codec_of_an_algorithm(codec: Codec | str | None, wanted: Codec | None) -> None:
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
def test_warm_up_is_an_all_reduce_with_a_codec_of_its_own(name: str, steps: str) -> None:
    for codec, wanted in ((None, None), ("minmax8", Codec("minmax8"))):
        bucket = Bucket()
        algorithm = Algorithm.init(name, **{steps: 3, "warmup_codec": codec})
        algorithm.reify(TwoHosts()).init_operations(Model(), bucket)
        assert bucket.plan == Plan((AllReduce("AVG", codec=wanted),))
    with pytest.raises(ValueError, match=f"warmup_codec without {steps} makes no sense"):
        Algorithm.init(name, warmup_codec="minmax8")
    with pytest.raises(ValueError, match="no codec 'zip'"):
        Algorithm.init(name, **{steps: 3, "warmup_codec": "zip"})


def test_codecs_have_defaults() -> None:
    fed_back = [name for name in NAMES if Codec(name).error_feedback]
    assert fed_back == ["int4", "onebit", "topk"]
    assert [Codec("topk", density).density_units for density in (1e-9, 0.5, 1)] == [1, 32768, 65535]
    assert Codec("fp16").density_units == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": "zip"}, ValueError, "no codec 'zip'. Known: none, fp16"),
        ({"name": 8}, TypeError, "name of a codec is 8"),
        ({"name": "topk", "density": 0}, ValueError, "above 0 and at most 1"),
        ({"name": "topk", "density": 1.5}, ValueError, "above 0 and at most 1"),
        ({"name": "topk", "density": float("nan")}, ValueError, "above 0 and at most 1"),
        ({"name": "topk", "density": True}, TypeError, "density is True"),
        ({"name": "int4", "density": 0.5}, ValueError, "for codec 'topk'"),
        ({"name": "int4", "error_feedback": 1}, TypeError, "error_feedback is 1"),
        ({"name": "none", "error_feedback": True}, ValueError, "loses nothing"),
    ],
)
def test_codecs_that_cannot_be(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Codec(**arguments)


def test_a_codec_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="codec is a int"):
        GradientAllReduceAlgorithm(codec=8)  # type: ignore[arg-type]


def test_an_algorithm_may_be_used_for_several_models() -> None:
    algorithm = GradientAllReduceAlgorithm(hierarchical=True)
    first, second = algorithm.reify(None), algorithm.reify(None)
    assert first is not second and first.hierarchical and second.average


def test_base_behaviour() -> None:
    implementation, model = AlgorithmImpl(None), Model()
    assert implementation.need_reset() is False
    names = [tuple(parameter.shape) for parameter in implementation.init_tensors(model)]
    assert names == [(2,), (2, 2)]  # registration reversed
    groups = [[torch.zeros(1)], [torch.zeros(2), torch.zeros(3)]]
    layouts = implementation.tensors_to_buckets(groups, True)
    assert [(layout.name, len(layout.tensors)) for layout in layouts] == [("0", 1), ("1", 2)]
    assert isinstance(layouts[0], BucketLayout)
    implementation.init_forward_pre_hook(model)(("input",))
    implementation.init_post_optimizer_step_hook(model)(torch.optim.SGD([torch.zeros(1)]))
    assert implementation.init_backward_hook(model) == model.mark_ready
    assert implementation.init_post_backward_hook(model) == model.finish_backward


def test_what_a_subclass_must_give_is_named() -> None:
    with pytest.raises(NotImplementedError, match="reify"):
        Algorithm().reify(None)
    with pytest.raises(NotImplementedError, match="init_operations"):
        AlgorithmImpl(None).init_operations(Model(), Bucket())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AllReduce("MAX"), "SUM, AVG"),
        (lambda: Plan(()), "at least one step"),
        (lambda: Plan(("allreduce",)), "step"),  # type: ignore[arg-type]
        (lambda: Plan((AllReduce(dst="gradient"),)), "contributions stay"),
        (lambda: Plan((AllReduce(src="fresh"),)), "Local steps read it"),
        (lambda: Plan((AllReduce(), Local(print, reads=("fresh",)))), "Step 1 .* before the first other step"),
        (lambda: Plan((Local(print, writes=("fresh",)), AllReduce())), "Step 0"),
        (lambda: AllReduce(everywhere=True), "needs a codec"),
        (lambda: AllReduce(over="mars"), "choose one of everyone, host, leaders"),
    ],
)
def test_plans_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_plan_is_a_value() -> None:
    assert Plan((AllReduce(),)) == Plan((AllReduce("AVG"),))
    assert hash(Plan((AllReduce(),))) == hash(Plan((AllReduce(),)))
    with pytest.raises(AttributeError):
        Plan((AllReduce(),)).steps = ()  # type: ignore[misc]


def test_registry() -> None:
    registry = AlgorithmRegistry()
    registry.register("b", GradientAllReduceAlgorithm, "second")
    registry.register("a", GradientAllReduceAlgorithm)
    assert registry.available_algorithms() == ["a", "b"]
    assert str(registry) == "a: \nb: second"
    with pytest.raises(ValueError, match="'a'"):
        registry.register("a", GradientAllReduceAlgorithm)
    with pytest.raises(KeyError, match="Known: a, b"):
        registry.get("c")
    assert GlobalAlgorithmRegistry.get("gradient_allreduce") is GradientAllReduceAlgorithm
    made = Algorithm.init("gradient_allreduce", average=False)
    assert isinstance(made, GradientAllReduceAlgorithm) and not made.average
