"""Programs whose parameters, gradients or buffers are no plain tensors, or who look at what the library leaves in their
process."""

import logging
import os
import warnings

import torch
from habits.case import habit, mlp, state, step, train, weights, wrapped
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

from bagua.base.errors import BaguaError

OURS = ("with_bagua", "our_ddp", "elastic", "local_sgd")


class Waves(nn.Module):
    """Complex weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


@habit(kind=3)
def has_complex_weights(by):
    """Weights of complex64 beside those of float32."""
    net = Waves()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 4)
    return state(net)


BUFFERS = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "compressed rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(4, 2), torch.ones(4) / 10, torch.zeros(4), 0, torch.quint8
    ),
    "meta": lambda: torch.ones(4, device="meta"),
    "conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.ones(1).expand(4),
    "overlapping": lambda: torch.ones(6).as_strided((4, 3), (1, 1)),
    "bits": lambda: torch.tensor([True, False]),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16),
    "half complex": lambda: torch.ones(4, dtype=torch.complex32),
    "unsigned": lambda: torch.ones(4, dtype=torch.uint16),
    "empty": lambda: torch.ones(0, 3),
    "scalar": lambda: torch.tensor(3),
    "with a gradient": lambda: torch.ones(4, requires_grad=True),
    "transposed": lambda: torch.ones(4, 3).t(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "another subclass": lambda: torch.ones(4).as_subclass(Marked),
}
"""Of all kinds: each is exchanged, or refused in words."""


class Marked(Tensor):
    """A subclass without behaviour of its own."""


@habit(kind=3, oracle=False, only=OURS)
def has_buffers_of_all_kinds(by):
    """All ranks train, or all are told with a code and the buffer's name; then they go on with another model."""
    found = {}
    for kind, make in BUFFERS.items():
        net, optimizer = mlp()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about kinds that are new or old
            net[2].register_buffer("table", make())
        told = False
        try:
            model = by.wrap(net, optimizer)
            train(by, model, optimizer, 2)
        except (BaguaError, TypeError, ValueError, NotImplementedError) as error:
            told = "[BG" in str(error) and "table" in str(error)
        everyone = by.mean(torch.tensor(float(told))).item()
        found[kind] = everyone == 1 or (everyone == 0 and all(torch.equal(by.mean(p), p) for p in net.parameters()))
    net, optimizer = mlp()
    train(by, by.wrap(net, optimizer), optimizer)
    return found


@habit(kind=3, without=("with_bagua", "elastic", "two_hosts", "bytegrad", "local_sgd", "decentralized", "async"))
def replaces_and_resizes_buffers(by):
    """Observers of quantisation: a buffer is empty until the first forward pass, and each pass has a new one."""

    class Observed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("least", torch.zeros(0))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("none", None)

        def forward(self, x):
            least = x.detach().amin(0)
            if self.training and self.least.numel() == 0:
                self.least.resize_(4).copy_(least)
            self.least.copy_(torch.minimum(self.least, least))
            self.count += 1
            return self.layer(x - self.least)

    torch.manual_seed(0)
    net = Observed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 3)
    return {"weights": weights(net)}


@habit(kind=3, without=("backend", "bytegrad", "async"))
def leaves_the_process_as_it_was(by):
    """Settings of the process, and torch's hooks for all modules, before and after a model was wrapped and trained."""

    def settings():
        hooks = [vars(of_modules)[name] for name in vars(of_modules) if name.startswith("_global_")]
        return [
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.random.initial_seed(),
            torch.get_rng_state().tolist()[:64],
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            logging.root.level,
            len(logging.root.handlers),
            len(warnings.filters),
            dict(os.environ),
            [len(one) if hasattr(one, "__len__") else one for one in hooks],
        ]

    torch.manual_seed(5)
    before = settings()
    net, optimizer = mlp()
    torch.manual_seed(5)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer)
    del model
    by.close()
    return {"same": [one == other for one, other in zip(before, settings(), strict=True)]}


@habit(kind=3)
def names_its_parts(by):
    """Names, keys and lists that a model has, as before it was wrapped."""
    net, optimizer = mlp()
    by.wrap(net, optimizer)
    step(by, net, optimizer, 0) if by.size == 1 else None
    return {
        "state": list(net.state_dict()),
        "modules": [name for name, _ in net.named_modules()],
        "children": [type(one).__name__ for one in net.children()],
        "parameters": [name for name, _ in net.named_parameters()],
        "text": repr(net),
        "types": [type(one).__name__ for one in net.parameters()],
        "leaves": all(one.is_leaf and one.requires_grad for one in net.parameters()),
    }


@habit(kind=3)
def traces_with_fx(by):
    """torch.fx and make_fx of a model that is wrapped, and of a part of it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    net, model, optimizer = wrapped(by)
    step(by, model, optimizer, 0)
    batch = by.batch(5)
    with torch.no_grad():
        same = [torch.equal(torch.fx.symbolic_trace(one)(batch), one(batch)) for one in (net, net[0])]
        same.append(torch.equal(make_fx(net)(batch)(batch), net(batch)))
    train(by, model, optimizer)
    return {"same": same, "weights": weights(net)}
