"""Training of wrapped models equals training of one process on all ranks' batches.

Every scenario runs on the same ranks, one after the other. The reference runs in each rank: its loss is the mean (or
sum) over ranks of the loss on that rank's batch, all in one process.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.communication import statistics

Loss = Callable[[nn.Module, int, int], torch.Tensor]  # (model, rank, step) -> loss on that rank's batch

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4))


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 6, 10)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def wrap(model: nn.Module, *optimizers: torch.optim.Optimizer, average: bool = True, **options: Any) -> nn.Module:
    return model.with_bagua(list(optimizers), GradientAllReduceAlgorithm(average=average), **options)


def check_identical(model: nn.Module) -> None:
    """All ranks hold the same bits."""
    for name, parameter in model.named_parameters():
        mine = parameter.detach().contiguous().view(-1).view(torch.uint8)
        everyone = torch.zeros(bagua.get_world_size(), mine.numel(), dtype=torch.uint8)
        bagua.allgather(mine, everyone)
        assert bool((everyone == everyone[0]).all()), f"{name} differs between ranks"


def check_close(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance / 10, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert (mine.grad is None) == (other.grad is None), f"gradient of {name}: {mine.grad} is not {other.grad}"
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=max(tolerance, 1e-4), atol=tolerance / 10)


def compare(
    make: Callable[[], nn.Module],
    loss: Loss = square,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    *,
    steps: int = 5,
    set_to_none: bool = True,
    average: bool = True,
    tolerance: float = 1e-5,
    between: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> nn.Module:
    """Trains ``make()`` wrapped, from rank 0's state, and as one process; both must agree. Returns the wrapped
    model."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference = seeded(make)
    reference_optimizer = optimizer(reference)
    model = seeded(make, seed=rank)  # different on every rank: rank 0's counts
    model_optimizer = optimizer(model)
    wrap(model, model_optimizer, average=average, **options)
    for step in range(steps):
        reference_optimizer.zero_grad(set_to_none)
        total = sum(loss(reference, other, step) for other in range(n)) / (n if average else 1)
        total.backward()
        between(reference)
        reference_optimizer.step()
        model_optimizer.zero_grad(set_to_none)
        loss(model, rank, step).backward()
        between(model)
        model_optimizer.step()
    check_close(model, reference, tolerance)
    check_identical(model)
    return model


@scenario
def plain() -> None:
    compare(mlp, steps=50)


@scenario
def gradients_zeroed_in_place() -> None:
    compare(mlp, set_to_none=False)


@scenario
def gradients_in_memory_of_their_own() -> None:
    compare(mlp, do_flatten=False)
    compare(mlp, do_flatten=False, set_to_none=False)


@scenario
def adam() -> None:
    compare(mlp, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))


@scenario
def sum_of_gradients() -> None:
    compare(mlp, average=False)
    compare(mlp, average=False, set_to_none=False)


@scenario
def root_parameters() -> None:
    compare(lambda: nn.Linear(10, 3))
    nothing = nn.Tanh()
    wrap(nothing)
    nothing(batch(0, 0, 3).requires_grad_()).sum().backward()

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls = nn.Parameter(torch.randn(1, 1, 10))
            self.body = nn.Linear(10, 10)
            self.position = nn.Parameter(torch.randn(7, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(torch.cat([self.cls.expand(1, -1, -1), x.unsqueeze(0)], 1) + self.position)

    compare(Vit)


@scenario
def convolution_with_batchnorm() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return functional.cross_entropy(model(batch(rank, step, 4, 3, 8, 8)), torch.tensor([0, 1, 2, 3]))

    compare(make, loss)
    compare(lambda: make().to(memory_format=torch.channels_last), loss)
    # Buffers are rank 0's at the start.
    model = make()
    for tensor in (model[1].running_mean, model[1].running_var, model[1].num_batches_tracked):
        tensor.fill_(bagua.get_rank() + 5)
    wrap(model)
    assert model[1].num_batches_tracked.item() == 5 and model[1].running_mean.tolist() == [5.0] * 8


class Branches(nn.Module):
    """Uses only the branches whose numbers it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.head = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for number in used:
            x = torch.tanh(self.branches[number](x))
        return self.head(x)


@scenario
def parameters_without_gradient() -> None:
    def some_steps(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 6, 10), [step % 4]).square().mean()

    def some_ranks(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 6, 10), [rank % 3] if step % 2 else [rank % 2, 2]).square().mean()

    for loss in (some_steps, some_ranks):
        for set_to_none in (True, False):
            for average in (True, False):
                compare(Branches, loss, set_to_none=set_to_none, average=average, steps=6)
        compare(Branches, loss, do_flatten=False, steps=6)


@scenario
def frozen_and_ignored_parameters() -> None:
    def make() -> nn.Module:
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    model = compare(make)
    assert model.bagua_ddp.bagua_build_params()[0][0] == "0.bias"

    for names in (["0.weight", "4.bias"], [".0.weight", ".4.bias"]):
        model = seeded(mlp, seed=bagua.get_rank())
        before = model[4].bias.detach().clone()
        model._bagua_params_and_buffers_to_ignore = names
        wrap(model, sgd(model))
        assert torch.equal(model[4].bias, before)
        square(model, bagua.get_rank(), 0).backward()
        alone = seeded(mlp, seed=bagua.get_rank())
        with torch.no_grad():
            for mine, other in zip(alone.parameters(), model.parameters(), strict=True):
                mine.copy_(other)
        square(alone, bagua.get_rank(), 0).backward()
        torch.testing.assert_close(model[4].bias.grad, alone[4].bias.grad)
        assert not torch.allclose(model[0].bias.grad, alone[0].bias.grad) or bagua.get_world_size() == 1


@scenario
def tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 10)
            self.body = nn.Linear(10, 10)
            self.head = nn.Linear(10, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(self.embed(x))))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        tokens = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        return functional.cross_entropy(model(tokens), tokens.roll(1))

    compare(Tied, loss)


@scenario
def mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(10, 16, dtype=torch.float64)
            self.b = nn.Linear(16, 16)
            self.c = nn.Linear(16, 16, dtype=torch.bfloat16)
            self.d = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.b(torch.tanh(self.a(x.double())).float()))
            return self.d(torch.tanh(self.c(x.bfloat16())).float())

    model = compare(Mixed, tolerance=0.05)
    for bucket in model.bagua_buckets:
        assert len({tensor.dtype for tensor in bucket.tensors}) == 1


@scenario
def accumulation() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for synced in ([False, False, True], [True, True, True], [True, False, True]):
        for average in (True, False):
            for set_to_none in (True, False):
                reference, model = seeded(mlp), seeded(mlp)
                optimizers = sgd(reference), sgd(model)
                wrap(model, optimizers[1], average=average)
                for step in range(3):
                    for optimizer in optimizers:
                        optimizer.zero_grad(set_to_none)
                    for part, sync in enumerate(synced):
                        for other in range(n):
                            (square(reference, other, 10 * step + part) / (n if average else 1)).backward()
                        with contextlib.nullcontext() if sync else model.bagua_ddp.no_sync():
                            square(model, rank, 10 * step + part).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                check_close(model, reference)
                check_identical(model)


@scenario
def several_passes() -> None:
    def double(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 6, 10)
        return model(x).square().mean() + model(x * 0.5).abs().mean()

    compare(mlp, double)

    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp)
    optimizers = sgd(reference), sgd(model)
    wrap(model, optimizers[1])
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = sum(square(reference, other, step) for other in range(n)) / n
        mine = square(model, rank, step)
        for loss in (total, mine):
            loss.backward(retain_graph=True)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    check_close(model, reference)

    # Derivatives that accumulate nothing leave everything as it is, also between backward and step.
    for average in (True, False):
        model = wrap(seeded(mlp), average=average)
        square(model, rank, 0).backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        torch.autograd.grad(square(model, rank, 1), list(model.parameters()))
        if rank == 0:
            x = batch(rank, 2, 6, 10).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)

    def penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 6, 10).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean() + square(model, rank, step)

    compare(mlp, penalty)


@scenario
def create_graph() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for flat in (True, False):
        reference, model = seeded(mlp), wrap(seeded(mlp), do_flatten=flat)
        with warnings_ignored():
            (sum(square(reference, other, 0) for other in range(n)) / n).backward(create_graph=True)
            square(model, rank, 0).backward(create_graph=True)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.detach(), other.grad.detach(), rtol=1e-4, atol=1e-6)
        reference.zero_grad()


@contextlib.contextmanager
def warnings_ignored() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@scenario
def mixed_precision() -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(model, rank, step)

    compare(mlp, loss, tolerance=0.02)

    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp)
    optimizers = sgd(reference), sgd(model)
    wrap(model, optimizers[1])
    scalers = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for step in range(4):
        losses = sum(square(reference, other, step) for other in range(n)) / n, square(model, rank, step)
        if step == 2 and rank == 0:  # an overflow on one rank makes all skip the step
            losses = losses[0], losses[1] * float("inf")
        for optimizer, scaler, value in zip(optimizers, scalers, losses, strict=True):
            optimizer.zero_grad()
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            if step != 2 or optimizer is optimizers[1]:
                scaler.step(optimizer)
            scaler.update(None if step != 2 else 32768.0)
    check_close_parameters(model, reference)
    check_identical(model)


def check_close_parameters(model: nn.Module, reference: nn.Module) -> None:
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@scenario
def clipping() -> None:
    def clip(model: nn.Module) -> object:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    compare(mlp, between=clip)
    compare(mlp, between=clip, set_to_none=False)


@scenario
def checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool, shared: bool) -> None:
            super().__init__()
            self.first = nn.Linear(10, 10)
            self.second = nn.Linear(10, 10)
            self.last = nn.Linear(10, 10)
            self.reentrant = reentrant
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for layer in (self.first, self.second, *([self.first, self.last] if self.shared else [self.last])):
                x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=self.reentrant)
            return x

    for reentrant in (False, True):
        for shared in (False, True):
            compare(lambda r=reentrant, s=shared: Checkpointed(r, s))
            compare(lambda r=reentrant, s=shared: Checkpointed(r, s), average=False, set_to_none=False)

    class Inside(nn.Module):
        """Checkpointed as a whole, called twice: two nested passes."""

        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    def whole(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 6, 10).requires_grad_()
        once = checkpoint(model, x, use_reentrant=True)
        return (once + checkpoint(model, x * 2, use_reentrant=True)).square().mean()

    compare(Inside, whole)


@scenario
def lbfgs() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()

    def make_optimizer(model: nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    reference, model = seeded(mlp), seeded(mlp, seed=rank)
    optimizers = make_optimizer(reference), make_optimizer(model)
    wrap(model, optimizers[1])

    def step_both(step: int) -> None:
        def of_reference() -> torch.Tensor:
            optimizers[0].zero_grad()
            loss = sum(square(reference, other, step) for other in range(n)) / n
            loss.backward()
            return loss

        def of_model() -> torch.Tensor:
            optimizers[1].zero_grad()
            loss = square(model, rank, step)
            loss.backward()
            return loss

        first = optimizers[0].step(of_reference)
        second = optimizers[1].step(of_model) if step % 2 else optimizers[1].step(closure=of_model)
        torch.testing.assert_close(second, first, rtol=1e-3, atol=1e-5)

    for step in range(3):
        step_both(step)
    check_identical(model)
    # Its state (lists of tensors, None among them) is broadcast too.
    again = seeded(mlp, seed=rank + 7)
    optimizer = make_optimizer(again)
    if rank == 0:
        optimizer.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    wrap(again, optimizer)
    (state,) = optimizer.state.values()
    (wanted,) = optimizers[1].state.values()
    assert state["n_iter"] == wanted["n_iter"] and len(state["old_dirs"]) == len(wanted["old_dirs"])
    assert all(torch.equal(a, b) for a, b in zip(state["old_dirs"], wanted["old_dirs"], strict=True))


@scenario
def resumed_on_rank_0_only() -> None:
    rank = bagua.get_rank()
    trained = seeded(mlp)
    optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3, betas=(0.8, 0.95), amsgrad=True)
    for step in range(3):
        square(trained, 0, step).backward()
        optimizer.step()
    wanted = copy.deepcopy(optimizer.state_dict())

    model = seeded(mlp, seed=rank)
    mine = torch.optim.Adam(model.parameters(), lr=1.0)
    if rank == 0:
        model.load_state_dict(trained.state_dict())
        mine.load_state_dict(copy.deepcopy(wanted))
    elif rank == 1:  # what other ranks had is forgotten
        square(model, 0, 0).backward()
        mine.step()
    wrap(model, mine)
    found = mine.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    for key, state in wanted["state"].items():
        assert set(found["state"][key]) == set(state)
        for name, tensor in state.items():
            assert torch.equal(found["state"][key][name], tensor), name
    check_close_parameters(model, trained)

    fresh = seeded(mlp)
    empty = torch.optim.Adam(fresh.parameters())
    if rank != 0:
        square(fresh, 0, 0).backward()
        empty.step()
    wrap(fresh, empty)
    assert not empty.state


@scenario
def wrapped_again() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = seeded(mlp, seed=rank)
    optimizer = sgd(model)
    for average, flat in ((True, True), (False, True), (True, False), (True, True)):
        wrap(model, optimizer, average=average, do_flatten=flat)
        reference = copy.deepcopy(model)
        assert "bagua_ddp" not in vars(reference) or reference.bagua_ddp is None
        (sum(square(reference, other, 0) for other in range(n)) / (n if average else 1)).backward()
        optimizer.zero_grad()
        square(model, rank, 0).backward()
        check_close(model, reference)
        optimizer.step()
        check_identical(model)
    assert model.bagua_module_name.startswith("Sequential_")
    assert model.bagua_optimizers == [optimizer] and model.bagua_ddp.bagua_train_step_counter == 1
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    square(loaded, rank, 0).backward()
    check_close_parameters(loaded, model)
    grads = [parameter.grad for parameter in model.parameters()]
    before = [gradient.clone() for gradient in grads]
    model.bagua_ddp.close()
    model.zero_grad()
    square(model, rank, 5).backward()  # an ordinary model again
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@scenario
def two_models_in_one_pass() -> None:
    """As in adversarial training: gradients of both come in one backward pass, and not in the same order everywhere."""
    rank, n = bagua.get_rank(), bagua.get_world_size()

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(10, 10), mlp()

    def loss(models: tuple[nn.Module, nn.Module], other: int) -> torch.Tensor:
        x = batch(other, 0, 6, 10)
        parts = [models[1](models[0](x)).square().mean(), models[0](x).abs().mean()]
        return parts[0] + parts[1] if other % 2 else parts[1] + parts[0]

    reference, models = make(), make()
    for model in models:
        wrap(model)
    (sum(loss(reference, other) for other in range(n)) / n).backward()
    loss(models, rank).backward()
    for model, other in zip(models, reference, strict=True):
        check_close(model, other)


@scenario
def one_rank_in_evaluation_mode() -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        model.train(rank != 0)
        return square(model, rank, step)

    compare(mlp, loss)
    model = wrap(seeded(mlp))
    if bagua.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            square(model, 0, 0)
    model.train()
    square(model, bagua.get_rank(), 0).backward()


@scenario
def exception_in_backward() -> None:
    """Caught before anything was exchanged, it leaves no trace."""

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    rank, n = bagua.get_rank(), bagua.get_world_size()
    for whole in (True, False):
        reference, model = seeded(mlp), wrap(seeded(mlp))
        output = model(batch(rank, 0, 6, 10))
        output.register_hook(fail)  # comes after ours, by which the pass has begun
        with pytest.raises(ArithmeticError):
            output.sum().backward()
        (sum(square(reference, other, 1) for other in range(n)) / n).backward()
        if whole:
            square(model, rank, 1).backward()
        else:  # past the hooks of the model as a whole: its parameters alone tell that a pass begins
            x = batch(rank, 1, 6, 10)
            for layer in model:
                x = layer(x)
            x.square().mean().backward()
        check_close(model, reference)


@scenario
def compiled() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp, seed=rank)
    optimizers = sgd(reference), sgd(model)
    wrap(model, optimizers[1])
    with warnings_ignored():
        fast = torch.compile(model, backend="aot_eager")
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (sum(square(reference, other, step) for other in range(n)) / n).backward()
            square(fast, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    check_close(model, reference)


@scenario
def statistics_add_up() -> None:
    before = statistics()
    compare(mlp, steps=3)
    after = statistics()
    assert after.steps == before.steps + 3
    assert after.comm_seconds > before.comm_seconds
    assert after.bytes_local > before.bytes_local
    assert 0 <= after.hidden_share <= 1


def rank_train(names: list[str]) -> None:
    """Says on standard output which scenarios went well."""
    bagua.init_process_group()
    for name in names:
        SCENARIOS[name]()
        bagua.barrier()
        print(f"passed {name}", flush=True)


LAYOUTS = {
    "2 ranks, small buckets": ([[0, 1]], "3000"),
    "4 ranks, one bucket": ([[0, 1, 2, 3]], None),
    "2 hosts, small buckets": ([[0], [1, 2]], "3000"),
    "1 rank": ([[0]], "3000"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def outputs(request: Any, tmp_path_factory: Any, make_ranks: Any) -> list[str]:
    """What every rank wrote."""
    hosts, bucket_bytes = LAYOUTS[request.param]
    environment = {"BAGUA_DEFAULT_BUCKET_SIZE": bucket_bytes} if bucket_bytes else {}
    with make_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        started = ranks.start(rank_train, hosts=hosts, environment=environment, names=list(SCENARIOS))
        ranks.wait()
        return [rank.output for rank in started]


@pytest.mark.parametrize("name", SCENARIOS)
def test_training(outputs: list[str], name: str) -> None:
    for rank, output in enumerate(outputs):
        assert f"passed {name}\n" in output, f"rank {rank}:\n{output}"
