"""Programs that hand their model to ``torch.jit``, to a copy, or to another process."""

import copy
import io
import pickle
import warnings

import torch
from habits.case import habit, mlp, train, weights
from torch import nn

WAYS = ("backend", "with_bagua", "our_ddp", "elastic", "decentralized")


def trained(by):
    """A net, the distributed model of it after two steps, and its optimizer."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, steps=2)
    return net, model, optimizer


def scripted(by, net):
    """Whether what ``torch.jit`` makes of the net, and what it saves and loads, computes what the net does."""
    rows = by.batch(9)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        made = [torch.jit.script(net), torch.jit.trace(net, rows)]
        for one in list(made):
            file = io.BytesIO()
            torch.jit.save(one, file)
            file.seek(0)
            made.append(torch.jit.load(file))
        wanted = net(rows)
        return [torch.equal(one(rows), wanted) for one in made]


@habit(kind=3, only=WAYS)
def scripts_its_model(by):
    """Deployment while training goes on: the model, a part of it, and a net that has nothing to do with it."""
    net, model, optimizer = trained(by)
    same = [scripted(by, one) for one in (net, net[0], nn.Sequential(nn.Linear(4, 2), nn.Tanh()))]
    train(by, model, optimizer)
    return {"same": same, "weights": weights(net)}


@habit(kind=3, only=WAYS)
def scripts_copies(by):
    """EMA, snapshots: copies of all kinds are ordinary models, which train by themselves."""
    net, model, optimizer = trained(by)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = [
        copy.deepcopy(net),
        copy.deepcopy(copy.deepcopy(net)),
        pickle.loads(pickle.dumps(net)),
        torch.load(file, weights_only=False),
    ]
    same = [scripted(by, one) for one in copies]
    for one in copies:
        one(by.batch(by.rank)).sum().backward()  # on one rank alone it would wait for others
    parts = [part for one in copies for part in one.modules()]
    hooks = [len(part._forward_hooks) + len(part._load_state_dict_post_hooks) for part in parts]
    train(by, model, optimizer)
    return {"same": same, "hooks": hooks, "copies": [weights(one) for one in copies], "weights": weights(net)}


class Noting(pickle.Unpickler):
    """Notes from which packages a pickled object comes."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.packages = set()

    def find_class(self, module, name):
        self.packages.add(module.split(".")[0])
        return super().find_class(module, name)


@habit(kind=3, only=WAYS)
def loads_weights_only(by):
    """A checkpoint that ``torch.load`` takes with ``weights_only``, which others need."""
    net, model, optimizer = trained(by)
    saved = [list(net.parameters()), net.state_dict(keep_vars=True), optimizer.state_dict(), net[0].weight]
    for one in saved:
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    train(by, model, optimizer)
    return {"weights": weights(net)}


@habit(kind=3, only=WAYS)
def pickles_for_a_process_with_torch_alone(by):
    """Serving: the other end has torch, and nothing of ours."""
    net, model, optimizer = trained(by)
    packages = []
    for one in (net, net[0], copy.copy(net), copy.deepcopy(net)):
        file = Noting(pickle.dumps(one))
        file.load()
        packages.append(sorted(file.packages))
    train(by, model, optimizer)
    return {"packages": packages, "weights": weights(net)}


@habit(kind=3, only=("backend",), tolerance=1e-12)
def trains_complex_parameters(by):
    """Spectral layers: parameters of complex numbers, alone and beside real ones."""
    torch.manual_seed(3)
    found = {}
    for number, kind in enumerate((torch.complex64, torch.complex128)):
        net = nn.ModuleList([nn.Linear(4, 3, dtype=kind), nn.Linear(3, 2, dtype=kind.to_real())][: number + 1])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        forward = nn.Sequential(*net) if number == 0 else Halves(*net)
        model = by.wrap(forward, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(by.batch(step).to(kind)).abs().square().mean().backward()
            optimizer.step()
        found[str(kind)] = weights(net)
    return found


class Halves(nn.Module):
    """A complex layer, and a real one behind it."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, rows):
        found = self.second(self.first(rows).abs())
        return found
