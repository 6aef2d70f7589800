"""Fused optimizers have the bits of plain ones: all of torch.optim, and classes of one's own."""

from __future__ import annotations

import copy
import functools
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse.optimizer import calculate_mutual_groups, fuse_step, is_fused_optimizer

Make = Callable[[list[Any]], Any]

# Several of one size and of few; one alone; one above the bound; sizes beside those of vectors.
SHAPES = [
    (7,),
    (33,),
    (10, 10),
    (7,),
    (33,),
    (5, 20),
    (3, 11),
    (1,),
    (1, 1),
    (64,),
    (8, 8),
    (2, 3, 4),
    (40_000,),
    (13,),
]

FUSABLE: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "foreach": True}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "foreach": True}, {"maximize": True}],
    "AdamW": [{}, {"amsgrad": True}, {"foreach": True}],
    "Adamax": [{}, {"weight_decay": 0.1, "foreach": True}],
    "ASGD": [{}, {"t0": 2, "weight_decay": 0.1}, {"t0": 2, "foreach": True}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True}],
    "RAdam": [{}, {"weight_decay": 0.1, "foreach": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}, {"foreach": True}],
    "Rprop": [{}, {"foreach": True}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}],
}
# Their words begin the reason.
UNFUSABLE = {"LBFGS": "LBFGS", "SparseAdam": "SparseAdam", "Adafactor": "Adafactor", "Muon": "Muon"}
# Not optimizers, or the base.
BESIDE = {"Optimizer"}


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step: int, some: Sequence[torch.Tensor], keep: bool = False, lacking: bool = False) -> None:
    """``keep``: as with set_to_none=False. ``lacking``: in each step some parameters have none."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(some):
        found = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if not parameter.requires_grad or (lacking and (number + step) % 5 == 0):
            parameter.grad = None
        elif keep and parameter.grad is not None:
            parameter.grad.copy_(found)
        else:
            parameter.grad = found


def differences(plain: Any, fused: Any) -> list[str]:
    """Of parameters and state."""
    found = []
    for one, other in zip(members(plain), members(fused), strict=True):
        if not torch.equal(one, other):
            found.append(f"parameter {list(one.shape)}")
        state, others = plain.state[one], fused.state[other]
        if state.keys() != others.keys():
            found.append(f"{state.keys()} {others.keys()}")
        for name, value in state.items():
            same = torch.equal(value, others[name]) if isinstance(value, torch.Tensor) else value == others[name]
            if not same:
                found.append(f"{name} of {list(one.shape)}")
    return found


def members(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def pair(make: Make, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
    """A plain optimizer and a fused one, with two groups each, on equal parameters."""
    made = []
    for _ in range(2):
        some = parameters(dtype)
        some[3].requires_grad = False
        made.append(make([{"params": some[:9]}, {"params": some[9:] + parameters(dtype)[:7], "lr": 0.02}]))
    return made[0], fuse_optimizer(made[1], **settings)


def train(plain: Any, fused: Any, steps: int = 6, first: int = 0, **settings: Any) -> None:
    for step in range(first, first + steps):
        gradients(step, members(plain), **settings)
        gradients(step, members(fused), **settings)
        plain.step()
        fused.fuse_step()
        assert differences(plain, fused) == [], f"step {step}"


def test_every_optimizer_of_torch_is_in_this_test() -> None:
    found = {
        name
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    }
    assert found - BESIDE <= FUSABLE.keys() | UNFUSABLE.keys()


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", FUSABLE)
def test_bits_of_the_plain_optimizer(name: str, keep: bool, lacking: bool) -> None:
    for flags in FUSABLE[name]:
        plain, fused = pair(functools.partial(getattr(torch.optim, name), **{"lr": 0.01, **flags}))
        train(plain, fused, keep=keep, lacking=lacking)
        assert fused._bagua_fused_count > 0
        if not lacking:
            assert fused._bagua_fused_count == 16, fused._bagua_fused_optimizer.explain()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adadelta"])
def test_bits_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    flags = FUSABLE[name][-1] if dtype is not torch.complex64 else {}
    plain, fused = pair(lambda groups: getattr(torch.optim, name)(groups, **{"lr": 0.01, **flags}), dtype)
    train(plain, fused)
    assert fused._bagua_fused_count > 0


@pytest.mark.parametrize("name", UNFUSABLE)
def test_others_step_plainly_and_say_why(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    some = parameters(shapes=[(4, 3), (4, 3), (3, 4)])
    optimizer = fuse_optimizer(getattr(torch.optim, name)(some, lr=0.1))
    plain = getattr(torch.optim, name)(parameters(shapes=[(4, 3), (4, 3), (3, 4)]), lr=0.1)
    for step in range(3):
        for one in (plain, optimizer):
            gradients(step, members(one))
            if name == "SparseAdam":
                for parameter in members(one):
                    parameter.grad = parameter.grad.to_sparse(1)  # type: ignore[union-attr]
        closure = (lambda: torch.tensor(0.5)) if name == "LBFGS" else None
        plain.step(*[closure] * (closure is not None))
        optimizer.fuse_step(closure)
    assert all(map(torch.equal, members(plain), members(optimizer)))
    assert optimizer._bagua_fused_count == 0
    (reason,) = optimizer._bagua_not_fused
    assert reason.startswith(UNFUSABLE[name]) and optimizer._bagua_not_fused[reason] == 3


def test_flags_that_can_not_be_fused() -> None:
    plain, fused = pair(lambda groups: torch.optim.Adam(groups, fused=True))
    train(plain, fused, 2)
    assert fused._bagua_fused_count == 0 and "torch's own kernel" in fused._bagua_fused_optimizer.explain()
    differentiable = fuse_optimizer(torch.optim.Adam([one.detach() for one in parameters()], differentiable=True))
    gradients(0, [one.requires_grad_() for one in members(differentiable)])
    for one in members(differentiable):
        one.requires_grad_(False)
    differentiable.fuse_step()  # type: ignore[attr-defined]
    assert "keeps the history" in differentiable._bagua_fused_optimizer.explain()  # type: ignore[attr-defined]


# State


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.01)


def saved(optimizer: Any) -> Any:
    """A state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_dict_round_trips_in_both_directions() -> None:
    plain, fused = pair(adam)
    train(plain, fused, 3)
    into_plain, into_fused = pair(adam)
    for source, target in ((fused, into_plain), (plain, into_fused)):
        with torch.no_grad():
            for one, other in zip(members(source), members(target), strict=True):
                other.copy_(one)
        target.load_state_dict(saved(source))
    assert differences(into_plain, into_fused) == []
    train(into_plain, into_fused, 3, first=3)
    assert into_fused._bagua_fused_count > 0
    fused.load_state_dict(saved(into_plain))  # into one that has blocks
    plain.load_state_dict(saved(into_plain))
    train(plain, fused, 3, first=6)


def test_a_resumed_optimizer_is_fused_from_the_first_step() -> None:
    plain, fused = pair(adam)
    train(plain, fused, 2)
    again, resumed = pair(adam)
    again.load_state_dict(saved(plain))
    resumed.load_state_dict(saved(plain))
    train(again, resumed, 1)
    assert resumed._bagua_fused_count > 0


def test_plain_and_fused_steps_in_turn() -> None:
    plain, fused = pair(adam)
    for step in range(8):
        for one in (plain, fused):
            gradients(step, members(one))
        plain.step()
        (fused.step if step % 3 == 2 else fused.fuse_step)()
        assert differences(plain, fused) == []


def test_a_copy_is_an_ordinary_optimizer() -> None:
    plain, fused = pair(adam)
    train(plain, fused, 3)
    copied = copy.deepcopy(fused)
    assert not is_fused_optimizer(copied)
    gradients(3, members(copied))
    gradients(3, members(plain))
    copied.step()
    plain.step()
    assert differences(plain, copied) == []


def test_parameters_that_move_and_groups_that_come() -> None:
    plain, fused = pair(adam)
    train(plain, fused, 3)
    for one in (plain, fused):
        first = members(one)[0]
        first.data = first.data.clone()  # as model.to() does
        one.add_param_group({"params": parameters(shapes=[(7,), (7,), (33,)]), "lr": 0.3})
    train(plain, fused, 4, first=3)
    assert fused._bagua_fused_count == 18


def test_parameters_of_two_dtypes_after_a_change_of_dtype() -> None:
    plain, fused = pair(lambda groups: torch.optim.SGD(groups, lr=0.1))
    train(plain, fused, 2)
    for one in (plain, fused):
        for parameter in members(one)[:9]:
            parameter.grad = None
            parameter.data = parameter.data.to(torch.bfloat16)
    train(plain, fused, 3, first=2)
    assert fused._bagua_fused_count > 0


# Memory


def flat_gradients(some: Sequence[torch.Tensor], sides: int = 2) -> list[list[torch.Tensor]]:
    """Views as buckets have them: behind one another, in buffers that change roles."""
    found = []
    for _ in range(sides):
        memory, views, begin = torch.zeros(sum(one.numel() for one in some)), [], 0
        for one in some:
            views.append(memory[begin : begin + one.numel()].view(one.shape))
            begin += one.numel()
        found.append(views)
    return found


def test_gradients_in_buckets_are_not_copied() -> None:
    """Weights and biases in turn, as the layers of a model have them: each lie at equal distances."""
    shapes = [(6, 5), (6,)] * 12
    plain, fused = adam(parameters(shapes=shapes)), fuse_optimizer(adam(parameters(shapes=shapes)))
    sides = flat_gradients(members(fused))
    for step in range(5):
        gradients(step, members(plain))
        for one, other, view in zip(members(plain), members(fused), sides[step % 2], strict=True):
            assert one.grad is not None
            other.grad = view.copy_(one.grad)
        plain.step()
        fused.fuse_step()  # type: ignore[attr-defined]
        assert differences(plain, fused) == []
        assert all(one.grad is view for one, view in zip(members(fused), sides[step % 2], strict=True))
    fusion = fused._bagua_fused_optimizer  # type: ignore[attr-defined]
    assert fused._bagua_fused_count == 24 and len(fusion.blocks) == 2  # type: ignore[attr-defined]
    assert all(block._gradients is None for block in fusion.blocks)


def test_blocks_follow_when_buckets_are_made_again() -> None:
    """In another order, as after another ``with_bagua``."""
    shapes = [(6, 5)] * 12
    plain, fused = adam(parameters(shapes=shapes)), fuse_optimizer(adam(parameters(shapes=shapes)))
    order = [*range(0, 12, 2), *range(11, 0, -2)]
    first = flat_gradients(members(fused))
    second = [[views[order.index(number)] for number in range(12)] for views in flat_gradients(members(fused))]
    for step in range(10):
        gradients(step, members(plain))
        sides = first if step < 4 else second
        for one, other, view in zip(members(plain), members(fused), sides[step % 2], strict=True):
            assert one.grad is not None
            other.grad = view.copy_(one.grad)
        plain.step()
        fused.fuse_step()  # type: ignore[attr-defined]
        assert differences(plain, fused) == []
        missed = [block.missed for block in fused._bagua_fused_optimizer.blocks]  # type: ignore[attr-defined]
        assert missed == ([] if step == 0 else [step in (4, 5)]), step


def test_gradients_that_stay_are_copied_once() -> None:
    _, fused = pair(adam)
    for step in range(5):
        gradients(step, members(fused), keep=True)
        fused.fuse_step()
    copies: list[object] = []
    fusion = fused._bagua_fused_optimizer
    for block in fusion.blocks:
        assert block._gradients is not None
        block._gradients.fill = lambda *arguments: copies.append(arguments)
    gradients(5, members(fused), keep=True)
    fused.fuse_step()
    assert copies == []


def test_parameters_in_memory_of_others_stay_there() -> None:
    """As in buckets of weights."""
    shapes = [(6, 5), (6,), (3, 10)] * 6
    plain, fused = adam(parameters(shapes=shapes)), fuse_optimizer(adam(parameters(shapes=shapes)))
    (views,) = flat_gradients(members(fused), sides=1)
    for one, view in zip(members(fused), views, strict=True):
        view.copy_(one.detach())
        one.data = view
    places = [one.data_ptr() for one in members(fused)]
    train(plain, fused, 4)
    assert [one.data_ptr() for one in members(fused)] == places and fused._bagua_fused_count == 18  # type: ignore[attr-defined]


def test_without_flattening_parameters_keep_their_memory() -> None:
    plain, fused = pair(adam, do_flatten=False)
    places = [one.data_ptr() for one in members(fused)]
    train(plain, fused, 4)
    assert [one.data_ptr() for one in members(fused)] == places and fused._bagua_fused_count == 16


def test_without_checks_the_bits_are_the_same() -> None:
    plain, fused = pair(adam, check_flatten=False)
    train(plain, fused, 4)


def test_memory_formats_and_odd_strides() -> None:
    def make() -> list[Any]:
        some = parameters(shapes=[(4, 3, 2, 2), (4, 3, 2, 2), (6, 8), (8, 6)])
        some[0].data = some[0].data.to(memory_format=torch.channels_last)
        some[2].data = some[2].data.t().contiguous().t()
        return some

    plain, fused = adam(make()), fuse_optimizer(adam(make()))
    train(plain, fused, 4)
    assert fused._bagua_fused_count == 4  # type: ignore[attr-defined]
    assert members(fused)[0].is_contiguous(memory_format=torch.channels_last)


def test_sparse_gradients_beside_dense_ones() -> None:
    def trained(fused: bool) -> Any:
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(5, 2, sparse=number == 1) for number in range(4)]
        optimizer: Any = torch.optim.SGD([table.weight for table in tables], lr=0.1)
        for step in range(4):
            (fuse_optimizer(optimizer) if fused and not step else optimizer).zero_grad()
            torch.stack([table(torch.tensor([step, 2])) for table in tables]).square().sum().backward()
            (optimizer.fuse_step if fused else optimizer.step)()
        return optimizer

    plain, fused = trained(False), trained(True)
    assert all(map(torch.equal, members(plain), members(fused))) and fused._bagua_fused_count == 2


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    some = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = fuse_optimizer(torch.optim.SGD(some, lr=0.1))
    for _ in range(2):
        gradients(0, some)
        optimizer.fuse_step()  # type: ignore[attr-defined]
    product = (some[0] * some[1]).sum()
    optimizer.fuse_step()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()  # type: ignore[no-untyped-call]


# The optimizer's surroundings


def test_hooks_see_the_optimizer_as_it_is() -> None:
    """Also tells when torch's private table of hooks moves."""
    seen: list[str] = []

    def look(when: str) -> Callable[..., None]:
        def hook(optimizer: Any, *_: Any) -> None:
            shapes = [one.shape for one in members(optimizer)]
            seen.append(when if shapes == [one.shape for one in parameters(shapes=[(7,)] * 3)] else f"{when} {shapes}")

        return hook

    optimizer = adam(parameters(shapes=[(7,)] * 3))
    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))
    fuse_optimizer(optimizer)
    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))
    for step in range(3):
        gradients(step, members(optimizer))
        optimizer.fuse_step()  # type: ignore[attr-defined]
    assert seen == ["before", "before", "after", "after"] * 3 and optimizer._bagua_fused_count == 3  # type: ignore[attr-defined]


def test_schedulers_count_fused_steps() -> None:
    plain, fused = pair(adam)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (plain, fused)]
    for step in range(4):
        train(plain, fused, 1, first=step)
        for scheduler in schedulers:
            scheduler.step()  # a warning, that is an error here, where it did not see the step
    assert fused.param_groups[0]["lr"] == 0.01 * 0.5**4


def test_closures_of_torch_are_called_once_before_the_step() -> None:
    plain, fused = pair(adam)
    for step in range(3):
        losses = []
        for one, make_step in ((plain, plain.step), (fused, fused.fuse_step)):

            def closure(step: int = step, one: Any = one) -> torch.Tensor:
                assert torch.is_grad_enabled()
                one.zero_grad()
                gradients(step, members(one))
                return torch.tensor(float(step))

            losses.append(make_step(closure))
        assert losses == [step, step] and differences(plain, fused) == []
    assert fused._bagua_fused_count > 0


def test_an_error_inside_the_step_leaves_the_optimizer_whole() -> None:
    plain, fused = pair(adam)
    train(plain, fused, 3)
    code = type(fused).step
    gradients(3, members(fused))

    def fails(*_: Any) -> None:
        raise OSError("on purpose")

    fused._init_group = fails
    with pytest.raises(OSError, match="on purpose"):
        fused.fuse_step()
    del fused._init_group
    assert differences(plain, fused) == [] and type(fused).step is code
    train(plain, fused, 2, first=3)


# Optimizers of one's own


class Counted(torch.optim.Optimizer):
    """A state of plain numbers, and tensors that are made anew in each step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["number"] = state.get("number", 0) + 1
                state["average"] = 0.9 * state.get("average", torch.zeros_like(parameter)) + 0.1 * parameter.grad
                if state["number"] == 4:
                    state["late"] = torch.ones_like(parameter)
                parameter.data = parameter.data - group["lr"] / state["number"] * state["average"]


class Trusted(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class ByNorm(Counted):
    """As LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["average"] = parameter.grad.clone()
                    parameter.sub_(state["average"] * parameter.norm(), alpha=group["lr"])


class ByShape(Counted):
    """Weights decay, biases don't."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(0.9 if parameter.dim() > 1 else 1.0).sub_(parameter.grad)


def test_an_optimizer_of_ones_own_with_numbers_and_new_tensors() -> None:
    plain, fused = pair(Counted)
    train(plain, fused, 7)
    assert fused._bagua_fused_count == 16
    assert [group["calls"] for group in fused.param_groups] == [7, 7]


def test_a_subclass_of_torchs_optimizer() -> None:
    plain, fused = pair(lambda groups: Trusted(groups, lr=0.1, momentum=0.9))
    train(plain, fused, 5)
    assert fused._bagua_fused_count == 16


@pytest.mark.parametrize("of", [ByNorm, ByShape])
def test_an_optimizer_that_looks_at_whole_parameters_is_found_out(of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bagua")
    plain, fused = pair(of)
    train(plain, fused, 5)
    assert fused._bagua_fused_count == 0
    assert "does not treat each element by itself" in fused._bagua_fused_optimizer.explain()
    assert "does not treat each element by itself" in caplog.text


def test_a_class_may_refuse() -> None:
    class Refuses(Counted):
        elementwise = False

    plain, fused = pair(Refuses)
    train(plain, fused, 3)
    assert fused._bagua_fused_count == 0 and "elementwise" in fused._bagua_fused_optimizer.explain()


def test_closures_of_ones_own_are_left_to_the_optimizer() -> None:
    _, fused = pair(Counted)
    calls: list[None] = []
    gradients(0, members(fused))
    fused.fuse_step(lambda: calls.append(None))
    assert calls == [None] and "closure" in fused._bagua_fused_optimizer.explain()


def test_qadam_through_its_warm_up_and_with_averaged_momentum() -> None:
    plain, fused = pair(lambda groups: QAdamOptimizer(groups, lr=0.01, warmup_steps=3, floor=0.1))
    for step in range(7):
        gradients(step, members(plain))
        gradients(step, members(fused))
        if step > 3:  # of all, or of some alone
            for one in (plain, fused):
                some = members(one)[: 5 if step == 5 else None]
                one.averaged.update({parameter: parameter.detach() * 0.1 for parameter in some})
        plain.step()
        fused.fuse_step()
        assert differences(plain, fused) == [] and not fused.averaged
        assert (fused._bagua_fused_count > 0) == (step != 2), step
    assert fused.step_id == 7


# Names


def test_groups_of_neighbours() -> None:
    memory = torch.rand(60)
    one, other = torch.rand(10), torch.rand(10)
    pieces = [memory[begin : begin + 10] for begin in range(0, 60, 10)]
    first = [pieces[2], pieces[0], pieces[1], one, pieces[4], pieces[5]]
    assert calculate_mutual_groups([first, [torch.rand(10) for _ in first]]) == []
    assert calculate_mutual_groups([first, first]) == [[1, 2, 0], [4, 5]]
    second = [pieces[2], pieces[0], pieces[1], one, other, pieces[5]]
    assert calculate_mutual_groups([first, second]) == [[1, 2, 0]]
    with pytest.raises(ValueError, match="as many in each"):
        calculate_mutual_groups([first, second[1:]])


def test_mistakes() -> None:
    with pytest.raises(TypeError, match="got a list"):
        fuse_optimizer([])  # type: ignore[arg-type]
    optimizer = adam(parameters())
    with pytest.raises(RuntimeError, match="is not fused"):
        fuse_step(optimizer)
    assert fuse_optimizer(optimizer) is optimizer
    with pytest.raises(RuntimeError, match="fused already"):
        fuse_optimizer(optimizer)
