"""A rank of the section ``regroup``: an elastic job on the card that loses a member in the middle of a step."""

import os
import signal
import time

import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.job.session import current
from gpu.common import device_of
from gpu.training_rank import Training, layers_of, quiet

RATE = 0.1  # parameters move so far that a lost gradient is seen beside rounding
KILLED = "KILLED"


def kill_self(*_):
    print(f"{KILLED} {time.monotonic()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Job:
    """One model in training, with batches of this member's own."""

    def __init__(self, kind, size):
        quiet()
        self.device = device_of(kind)
        bagua.init_process_group()
        self.size = size
        self.member = current().membership.member
        self.training = self.plain(self.member)

    def plain(self, member):
        """A model that is not wrapped, and the batch of a member."""
        made = Training(layers_of(*self.size, self.device, batches_of=member))
        made.optimizer.param_groups[0]["lr"] = RATE
        return made

    def step(self):
        """One step; returns when the card was done with it. It waits for this stream alone: on another one an average
        may be under way, which waits for a rank that is in a barrier."""
        self.training.step()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.monotonic()


def loses_one(kind, size, victim, cut, steps):
    """Trains; the victim is killed in backward of step ``cut``, in its middle. Returns when each step ended, how many
    members it was of, how far the parameters are from those of one process that has the batches of these members, and
    the parameters."""
    job = Job(kind, size)
    job.training.with_bagua()
    ended, worlds = [time.monotonic()], []
    for step in range(steps):
        if step == cut and job.member == victim:
            parameters = list(job.training.model.parameters())
            parameters[len(parameters) // 2].register_post_accumulate_grad_hook(kill_self)
        ended.append(job.step())
        worlds.append(bagua.get_world_size())
    everybody = range(worlds[0])
    members_of = [[one for one in everybody if step < cut or one != victim] for step in range(steps)]
    mine = flat(job.training.model)
    return {
        "ended": ended,
        "worlds": worlds,
        "apart": apart(mine, flat(job.plain(0).model), reference(job, members_of)),
        "parameters": mine.cpu(),
    }


def reference(job, members_of):
    """Parameters of one process that has the batches of these members in each step."""
    losses = {member: job.plain(member).loss_of for member in members_of[0]}
    one = job.plain(0)
    for members in members_of:
        one.optimizer.zero_grad()
        for member in members:
            (losses[member](one.model) / len(members)).backward()
        one.optimizer.step()
    return flat(one.model)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def apart(mine, before, wanted):
    """By the way that the parameters went."""
    return float((mine - wanted).norm() / (wanted - before).norm())


def averages(kind, size, waiter, victim, steps):
    """Asynchronous averages: one member waits in a barrier while another one is killed and the others train on. Returns
    when the barrier was over, and whether averages came after it."""
    job = Job(kind, size)
    algorithm = Algorithm.init("async", sync_interval_ms=0)
    job.training.model = job.training.model.with_bagua([job.training.optimizer], algorithm)
    for _ in range(steps):
        job.step()
    bagua.barrier()
    world = bagua.get_world_size()
    if job.member == victim:
        for _ in range(steps):
            job.step()
        kill_self()
    if job.member != waiter:
        while bagua.get_world_size() == world:
            job.step()
        for _ in range(steps):
            job.step()
    bagua.barrier()
    met = time.monotonic()
    rounds = job.training.model.bagua_algorithm.rounds
    while job.training.model.bagua_algorithm.rounds == rounds:
        job.step()
    finite = bool(flat(job.training.model).isfinite().all())
    return {"met": met, "finite": finite, "world": bagua.get_world_size()}
