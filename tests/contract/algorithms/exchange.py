"""Helpers for references of several algorithms: the order of buckets, the codecs' kernel, pairs, and volumes."""

import torch
from contract.algorithms.case import nbytes

import bagua.torch_api as bagua
from bagua import csrc
from bagua.algorithms import Codec


class Coder:
    """A codec's kernel on whole vectors, in the order of one bucket: parameters reversed."""

    def __init__(self, codec, model):
        self.codec = Codec(codec)
        sizes = [parameter.numel() for parameter in model.parameters()]
        places = torch.arange(sum(sizes)).split(sizes)
        self.order = torch.cat(list(reversed(places)))
        self.back = torch.argsort(self.order)

    def __call__(self, vector, residual=None):
        """Encodes and decodes ``vector`` (in the order of registration); updates ``residual`` (in the order of the
        bucket)."""
        core = csrc.load()
        number, density = core.CODECS[self.codec.name], self.codec.density_units
        raw = vector[self.order].contiguous()
        decoded = torch.empty_like(raw)
        message = torch.empty(core.encoded_bytes(number, raw.numel(), density), dtype=torch.uint8)
        core.transcode(
            number,
            raw.numel(),
            raw=[raw.numpy()],
            residual=None if residual is None else residual.numpy(),
            message=message.numpy(),
            decoded=[decoded.numpy()],
            density=density,
        )
        return decoded[self.back]


def everyones(values):
    """A tensor of each rank, in the order of ranks; in ranks."""
    found = values.new_zeros(bagua.get_world_size(), values.numel())
    bagua.allgather(values.detach().clone().view(-1), found)
    return found


def units(sim, hierarchical):
    """The ranks of each host, or each rank by itself."""
    return list(sim.world.hosts) if hierarchical else [(rank,) for rank in range(sim.n)]


def shift_one(unit, n, round):
    """The peer of ``unit`` of n, as the original has it."""
    if unit < n / 2:
        return (round + unit) % ((n + 1) // 2) + n // 2
    return (unit - n // 2 - round) % (n // 2)


def pairs_of_round(members, round):
    """Ranks that average together in a round; a unit that is alone averages inside itself."""
    n = len(members)
    if n == 1:
        return list(members)
    return [(*members[unit], *members[shift_one(unit, n, round)]) for unit in range(n // 2)]


def exchange_differences(code, pair, values, known, first):
    """A pair of ranks exchanges C of its differences to its last mean (``first`` before there is one), and moves its
    values to the mean but for what the codec has left out."""
    reference = known.get(pair, first)
    sent = [code(values[rank] - reference) for rank in pair]
    mean = sent[0] * 0.5 + sent[1] * 0.5
    known[pair] = reference + mean
    for rank, own in zip(pair, sent, strict=True):
        values[rank] = values[rank] + mean - own


def share(ratio):
    """r 2(h-1)/h of the model."""
    return lambda world, model: ratio * 2 * (len(world.hosts) - 1) / len(world.hosts) * nbytes(model)
