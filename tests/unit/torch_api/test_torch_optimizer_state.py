"""State of optimizers on its way to other ranks, and into checkpoints."""

import torch

from bagua.torch_api.train.optimizer_state import decode_optimizer, encode_optimizer, optimizer_paths


class Counting(torch.optim.SGD):
    """Keeps something for all parameters together under names, as torch's ``state_dict`` allows it."""

    def step(self, closure=None):
        self.state["calls"]["number"] = self.state["calls"].get("number", 0) + 1
        self.state["norms"].setdefault("last", torch.zeros(1)).add_(2)
        self.state["hooks"]["own"] = print  # no plain data
        return super().step(closure)


def make():
    parameter = torch.nn.Parameter(torch.ones(3))
    return parameter, Counting([parameter], lr=0.1, momentum=0.9)


def through(optimizer, other):
    """Takes the state from one to the other. Returns the names of the tensors."""
    given = []
    document = encode_optimizer(optimizer, given)
    made = []
    decode_optimizer(other, document, made)
    for target, source in zip(made, given, strict=True):
        target.copy_(source)
    names = optimizer_paths(optimizer, document, {})
    assert len(names) == len(given)
    return names


def test_state_under_names():
    parameter, optimizer = make()
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    again, other = make()
    assert through(optimizer, other) == [("state", "parameter 0", "momentum_buffer"), ("named", "norms", "last")]
    assert other.state["calls"] == {"number": 2} and other.state["norms"]["last"].item() == 4
    assert torch.equal(other.state[again]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])
    assert "own" not in other.state["hooks"]
    document = {key: one for key, one in encode_optimizer(make()[1], []).items() if key != "named"}
    decode_optimizer(other, document, [])  # of an earlier version
