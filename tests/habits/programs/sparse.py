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
