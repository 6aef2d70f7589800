"""Section: an elastic job loses a rank in a training step. How soon do the others go on, and with right results?"""

import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from rig.ranks.engine_hosts import make_ranks
from rig.ranks.placing import environment

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.job.session import current
from gpu.common import device_of, median
from gpu.faults import killed_at
from gpu.findings import section
from gpu.training_rank import Training, layers_of, quiet

HOSTS = ((0, 1), (2,))
VICTIM, WAITER = 1, 2
CUT, STEPS = 6, 12
TARGET_S = 1.0
"""From the kill to the end of the step that it cut off, which the others have repeated."""
APART = 1e-3
SIZE, REHEARSED = (1448, 12, 128), (32, 4, 8)  # width, layers, batch; 96 MiB of parameters
SEVERAL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "5000"}  # where the model is small
AFTER_S = 10.0
"""More than the others need to come to their end: a hang costs no more than this."""
ROUTES = ("flat", "staged")


def run(findings, name, given, route, limit_s, function, **more):
    """Returns when the victim was killed, and the results of the others."""
    real = given.device == "cuda"
    with tempfile.TemporaryDirectory() as folder, make_ranks(Path(folder)) as ranks:
        ranks.start(
            function,
            hosts=HOSTS,
            elastic=True,
            environment=environment(given.device, route) | ({} if real else SEVERAL_BUCKETS),
            kind=given.device,
            size=SIZE if real else REHEARSED,
            victim=VICTIM,
            **more,
        )
        killed = killed_at(ranks, limit_s - AFTER_S)
        ranks.wait(AFTER_S + limit_s / 4)
        return killed, [one.result() for one in ranks.started if one.rank != VICTIM]


def step_is_repeated(findings, given, route, limit_s):
    """All gradients are averaged in each step."""
    killed, found = run(findings, route, given, route, limit_s, loses_one, cut=CUT, steps=STEPS)
    worlds = [3] * CUT + [2] * (STEPS - CUT)
    for one in found:
        findings.check(
            f"{route}: the step counts with those that are left", one["worlds"] == worlds, str(one["worlds"])
        )
        findings.check(
            f"{route}: as one process with their batches", one["apart"] <= APART, f"apart {one['apart']:.3g}"
        )
    same = all(torch.equal(one["parameters"], found[0]["parameters"]) for one in found)
    findings.check(f"{route}: the same parameters on all ranks", same)
    pause = max(one["ended"][CUT + 1] for one in found) - killed
    lasted = [after - before for before, after in itertools.pairwise(found[0]["ended"])]
    findings.row(
        "from the kill to the end of the repeated step",
        route=route,
        s=pause,
        target="met" if pause <= TARGET_S else "missed",
        **{"a step before, ms": median(lasted[2:CUT]) * 1e3, "the step after, ms": lasted[CUT + 1] * 1e3},
    )


def averages_go_on(findings, given, route, limit_s):
    """Weights are averaged in the background; one rank is in a barrier when another one is lost."""
    name = f"{route}, asynchronous averages"
    killed, found = run(findings, name, given, route, limit_s, averages, waiter=WAITER, steps=5)
    for one in found:
        findings.check(f"{name}: averages go on with those that are left", one["world"] == 2 and one["finite"])
    met = max(one["met"] for one in found) - killed
    findings.row("asynchronous averages: from the kill to the end of a barrier", route=route, s=met)


def work(findings, given):
    begun = time.monotonic()
    cases = [(case, route) for case in (step_is_repeated, averages_go_on) for route in ROUTES]
    for index, (case, route) in enumerate(cases):
        share = (given.seconds - (time.monotonic() - begun)) / (len(cases) - index)
        with findings.guarded(f"{case.__name__}, {route}"):
            case(findings, given, route, max(20.0, share))
    findings.note(f"Target: {TARGET_S} s from the kill to the end of the step. All ranks share the card.")


# In a rank


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


if __name__ == "__main__":
    sys.exit(section("regroup", work, __doc__))
