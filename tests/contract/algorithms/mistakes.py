"""Bad input, with every algorithm: it must end in a clear error on every rank or in the right result.

Each check runs in every rank with a ``Subject``, as those of general.py do. Ranks that wait for each other for a minute
fail the test.
"""

import torch
from contract.algorithms.case import mlp, replica, square
from contract.algorithms.exchange import everyones
from contract.algorithms.general import identical, take_steps, unwrap, wrap
from contract.algorithms.subjects import CLEAR, Subject
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import GradientAllReduceAlgorithm

MISTAKES = {}


def mistake(function):
    """Registers a check of bad input."""
    MISTAKES[function.__name__] = function
    return function


def clear_error(action, words=""):
    """The message with which ``action`` fails on every rank, "" if it works on every rank. It must say something."""
    message = ""
    try:
        action()
    except CLEAR as error:
        message = f"{type(error).__name__}: {error}"
        assert len(str(error).split()) > 4, f"no clear error: {message}"
        assert words in str(error), f"{message!r} does not name {words!r}"
    fail = everyones(torch.tensor([bool(message)], dtype=torch.uint8)).flatten().tolist()
    assert len(set(fail)) == 1, f"some ranks fail, others do not: {fail}, here {message!r}"
    return message


def still_usable():
    """After an error the process trains on."""
    model, optimizers = wrap(Subject("gradient_allreduce", GradientAllReduceAlgorithm))
    take_steps(model, optimizers, 2)
    assert identical(model)
    unwrap(model)


@mistake
def different_shapes(subject):
    """A model that is another one on the last rank."""
    width = 7 if bagua.get_island() == bagua.get_replica_count() - 1 and bagua.get_replica_count() > 1 else 6
    message = clear_error(lambda: unwrap(wrap(subject, lambda: nn.Linear(10, width))[0]))
    assert bool(message) == (bagua.get_world_size() > 1)
    still_usable()


@mistake
def nothing_to_train(subject):
    """A model whose parameters are all frozen, or that has none."""

    def action(make):
        model = make()
        model.with_bagua([], subject.make())
        model(torch.zeros(1, 10))
        unwrap(model)

    clear_error(lambda: action(lambda: mlp().requires_grad_(False)))
    clear_error(lambda: action(nn.Tanh))
    still_usable()


@mistake
def sparse_gradients(subject):
    """An embedding with sparse gradients is refused by name, or exchanged."""
    made = []
    if not clear_error(lambda: made.append(wrap(subject, lambda: nn.Embedding(10, 4, sparse=True))[0])):
        (model,) = made
        model(torch.tensor([bagua.get_rank()])).sum().backward()
        unwrap(model)
    still_usable()


class Unknown(torch.optim.Optimizer):
    """An optimizer that nobody has heard of."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rate": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["rate"] * parameter.grad.sign()


@mistake
def unusual_optimizers(subject):
    """Fused, unknown, several, none at all, one for a part of the model: each trains or is refused."""

    def train_with(make):
        def action():
            model = replica(mlp)
            optimizers = make(model)
            model.with_bagua(optimizers, subject.make())
            take_steps(model, optimizers, 3, subject=subject)
            unwrap(model)

        return action

    clear_error(train_with(lambda model: [torch.optim.SGD(model.parameters(), lr=0.01, fused=True)]))
    clear_error(train_with(lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)]))
    clear_error(train_with(lambda model: [Unknown(model.parameters())]))
    clear_error(train_with(lambda model: [torch.optim.SGD(list(model[0].parameters()), lr=0.01)]))
    clear_error(
        train_with(lambda model: [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[0], model[2:])])
    )
    clear_error(train_with(lambda model: []))
    assert clear_error(train_with(lambda model: ["adam"])), "a text is not an optimizer"
    still_usable()


@mistake
def gradients_that_are_not_numbers(subject):
    """nan on one rank hangs nobody."""
    model, optimizers = wrap(subject)
    take_steps(model, optimizers, 1)

    optimizers[0].zero_grad()
    (square(model, bagua.get_island(), 0) * (float("nan") if bagua.get_rank() == 0 else 1.0)).backward()
    optimizers[0].step()
    unwrap(model)
    still_usable()
