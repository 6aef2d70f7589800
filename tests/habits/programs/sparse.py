"""Programs with sparse gradients."""

import torch
from habits.case import gradients, habit, weights
from torch import nn


class Lookup(nn.Module):
    """Sums of rows of two tables, and a layer behind them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.bags = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        self.last = nn.Linear(4, 20)

    def forward(self, words, bags):
        return self.last(self.words(words).sum(1) + self.bags(bags))


def numbers(by, step):
    """As many on no two ranks, some twice."""
    generator = torch.Generator().manual_seed(100 * step + by.rank)
    words = torch.randint(0, 20, (3, 2 + by.rank), generator=generator)
    return words, torch.randint(0, 10, (3, 2), generator=generator)


@habit(kind=3)
def trains_sparse_embeddings(by):
    """``Embedding(sparse=True)``, also over two passes and in no_sync."""
    net = Lookup()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 1:
            with by.no_sync(model):
                model(*numbers(by, 50)).square().mean().backward()
        if step == 2:
            model(*numbers(by, 60)).square().mean().backward()
        model(*numbers(by, step)).square().mean().backward()
        found.append(gradients(net))
        optimizer.step()
    return {"gradients": found, "weights": weights(net)}


@habit(kind=3)
def keeps_sparse_gradients(by):
    """Gradients that are set to zero, not to None, of tables in float64 with padding, and one that is kept."""
    net = Lookup().double()
    net.words.padding_idx = 3
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    kept = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        model(*numbers(by, step)).square().mean().backward()
        if step == 1:
            kept = [net.words.weight.grad, net.words.weight.grad.clone()]
            net.words.weight.grad = None
        optimizer.step()
    same = torch.equal(kept[0].to_dense(), kept[1].to_dense())
    return {"same": same, "gradients": gradients(net), "weights": weights(net)}


@habit(kind=3)
def uses_sparse_adam(by):
    """One optimizer for the tables, and another one for the rest."""
    net = Lookup()
    sparse = torch.optim.SparseAdam([net.words.weight, net.bags.weight], lr=0.01)
    dense = torch.optim.SGD(net.last.parameters(), lr=0.1)
    model = by.wrap(net, sparse, dense)
    for step in range(3):
        sparse.zero_grad()
        dense.zero_grad()
        model(*numbers(by, step)).square().mean().backward()
        sparse.step()
        dense.step()
    return {"weights": weights(net)}
