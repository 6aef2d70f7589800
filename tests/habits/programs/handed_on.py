"""Programs that hand their model to ``torch.jit``, to a copy, or to another process."""

import copy
import io
import pickle
import warnings

import torch
from habits.case import habit, train, weights, wrapped
from torch import nn

WAYS = ("backend", "with_bagua", "our_ddp", "elastic", "decentralized")


def trained(by):
    """A net, the distributed model of it after two steps, and its optimizer."""
    net, model, optimizer = wrapped(by)
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
def saves_for_a_process_with_torch_alone(by):
    """Checkpoints that ``torch.load`` takes with ``weights_only``, and pickled models that have nothing of ours."""
    net, model, optimizer = trained(by)
    for one in (list(net.parameters()), net.state_dict(keep_vars=True), optimizer.state_dict(), net[0].weight):
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    packages = []
    for one in (net, net[0], copy.copy(net), copy.deepcopy(net)):
        file = Noting(pickle.dumps(one))
        file.load()
        packages.append(sorted(file.packages))
    train(by, model, optimizer)
    return {"packages": packages, "weights": weights(net)}
