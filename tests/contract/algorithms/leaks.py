"""Switching a live model through all algorithms again and again: what there is after each round must not grow."""

import gc
import threading
from pathlib import Path

import torch
from contract.algorithms.case import seeded, volume_loss, volume_model
from contract.algorithms.subjects import CLEAR, registered_names, subject_of

import bagua.torch_api as bagua
from bagua.torch_api.job.session import current

STEPS = 3


class Communicators:
    """Counts the communicators that exist."""

    def __init__(self):
        self.alive = 0
        connection = current().connection
        connection.create_comm = self._counting(connection.create_comm, 1)
        connection.destroy_comm = self._counting(connection.destroy_comm, -1)

    def _counting(self, call, change):
        def counted(*arguments, **options):
            found = call(*arguments, **options)
            self.alive += change
            return found

        return counted


def resident_bytes():
    """Memory of this process, pages shared with others left out."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096


def tensors_alive():
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())  # no look at lazy modules


def switch(rounds):
    """Resources in use after each round through all algorithms."""
    communicators = Communicators()
    model = seeded(volume_model, seed=bagua.get_rank())
    found = []
    for _ in range(rounds):
        for name in registered_names():
            subject = subject_of(name)
            optimizers = subject.optimizers(model)
            try:
                model.with_bagua(optimizers, subject.make())
            except CLEAR:  # this world is none for it
                continue
            for step in range(STEPS):
                optimizers[0].zero_grad()
                volume_loss(model, bagua.get_rank(), step).backward()
                optimizers[0].step()
            optimizers[0].zero_grad()
        model.bagua_ddp.close()
        del optimizers
        gc.collect()
        bagua.barrier()  # all ranks have given back what they held
        counters = current().connection.counters()
        found.append(
            {
                "threads": threading.active_count(),
                "native threads": len(list(Path("/proc/self/task").iterdir())),
                "files": len(list(Path("/proc/self/fd").iterdir())),
                "maps": sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines()),
                "tensors": tensors_alive(),
                "communicators": communicators.alive,
                "shared bytes": counters["segment_bytes"],
                "bytes of error feedback": counters["residual_bytes"],
                "memory": resident_bytes(),
            }
        )
        bagua.barrier()  # nobody makes memory again before all have looked
    return found
