"""Models that ranks of several sections train on the card."""

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.bench.ranks.models import WORKLOADS, Workload
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


def model_of(width, layers, device):
    """Linear layers with activations between them; the same everywhere."""
    torch.manual_seed(0)
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, device=device), nn.GELU()]
    return nn.Sequential(*parts)


def layers_of(width, layers, batch, device, batches_of=None):
    """``model_of``, with a batch of the rank's own, or ``batches_of`` another one: of the same batches a mean would be
    what it was before."""
    model = model_of(width, layers, device)
    torch.manual_seed(1 + (bagua.get_rank() if batches_of is None else batches_of))
    inputs = torch.randn(batch, width, device=device)
    return Workload(model, lambda model: model(inputs).square().mean())


def workload_of(which, device):
    """``which``: a model of ``bagua bench train``, or (width, layers, batch). Its parameters may be other ones in each
    rank: wrapping gives all of them rank 0's."""
    if not isinstance(which, str):
        width, layers, batch = which
        return layers_of(width, layers, batch, device)
    torch.manual_seed(1 + bagua.get_rank())
    with torch.device(device):
        return WORKLOADS[which]()


class Training:
    """A model, its optimizer, and a batch of the rank's own that lies on the card."""

    def __init__(self, workload):
        self.model, self.loss_of = workload.model, workload.loss_of
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def with_bagua(self):
        self.model = self.model.with_bagua([self.optimizer], GradientAllReduceAlgorithm())
        return self

    def with_ddp(self, device):
        places = [device] if device.type == "cuda" else None
        self.model = DistributedDataParallel(self.model, device_ids=places, gradient_as_bucket_view=True)
        return self

    def step(self):
        """One step, without a wait of its own."""
        self.optimizer.zero_grad(set_to_none=False)
        self.loss_of(self.model).backward()
        self.optimizer.step()


def quiet():
    """The rig makes errors of warnings; here torch's warnings are no matter."""
    warnings.simplefilter("ignore")
