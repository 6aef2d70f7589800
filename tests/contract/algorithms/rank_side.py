"""Ranks of the contract suite: they run one job after the other, each with a deadline and a file for what it found."""

import faulthandler
import os
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests
sys.path.append(os.getcwd())  # where a user's algorithm may be

from contract.algorithms import leaks, load_cases
from contract.algorithms.case import flat, replica, volume_loss, volume_model, whole
from contract.algorithms.exchange import everyones
from contract.algorithms.general import CHECKS
from contract.algorithms.mistakes import MISTAKES
from contract.algorithms.subjects import subject_of
from rig.ranks.placing import on_host

import bagua.torch_api as bagua
from bagua.base.replica_check import VARIABLE
from bagua.torch_api.train import replica_check

JOB_DEADLINE_S = float(os.environ.get("BAGUA_TEST_JOB_S", 200.0))
PATIENCE_S = 15.0
"""For hangs alone: a rank that takes longer for a job, or waits longer after an error until the others have ended
theirs, shows where it stands, and ends. On a machine that is lent for minutes tests/gpu says how long is too long."""


def rank_jobs(names, folder):
    """Does the jobs ("case NAME", "volume NAME", "check SUBJECT CHECK", "switch ROUNDS") in their order. Writes what
    each returned, or its error, to a file."""
    bagua.init_process_group()
    compare_replicas()
    for number, name in enumerate(names):
        faulthandler.dump_traceback_later(JOB_DEADLINE_S, exit=True)
        found = {}
        try:
            found["result"] = job(name)()
        except BaseException:
            found["error"] = traceback.format_exc()
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        path = Path(folder) / f"{number}-{bagua.get_rank()}.pt"
        torch.save(found, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        bagua.barrier()  # who is in step goes on, whatever went wrong
        faulthandler.cancel_dump_traceback_later()


def compare_replicas(every=1):
    """From now on models compare theirs after each such exchange, and raise BaguaError where they differ."""
    os.environ[VARIABLE] = "error"
    replica_check.EVERY = every


def job(name):
    kind, _, rest = name.partition(" ")
    if kind == "case":
        return lambda: train_case(load_cases()[rest])
    if kind == "volume":
        return lambda: volume(load_cases()[rest])
    if kind == "check":
        subject, _, check = rest.partition(" ")
        return lambda: (CHECKS | MISTAKES)[check](subject_of(subject))
    if kind == "switch":
        return lambda: leaks.switch(int(rest))
    raise ValueError(f"Unknown job {name!r}.")


def check_identical(model):
    for name, parameter in model.named_parameters():
        everyone = everyones(on_host(whole(parameter)).contiguous().view(-1).view(torch.uint8))
        assert bool((everyone == everyone[0]).all()), f"{name} differs between ranks"


def one_step(model, optimizers, loss, rank, step):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss(model, rank, step).backward()
    for optimizer in optimizers:
        optimizer.step()


def wrapped(case, make):
    """A model with other parameters on every rank before it is wrapped, and its optimizers."""
    if case.bucket_bytes is None:
        os.environ.pop("BAGUA_DEFAULT_BUCKET_SIZE", None)
    else:
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(case.bucket_bytes)
    model = replica(make)
    optimizers = case.optimizers(model)
    return model.with_bagua(optimizers, case.algorithm(), **case.options), optimizers


def train_case(case):
    model, optimizers = wrapped(case, case.model)
    train = case.train or one_step
    found = []
    for step in range(case.steps):
        train(model, optimizers, case.loss, bagua.get_island(), step)
        found.append(flat(model))
        if case.must_be_equal(step):
            check_identical(model)
        if bagua.get_island_size() == 1:  # checks look into buckets, whose parts differ
            case.check(model, step)
    model.bagua_ddp.close()
    return found


def sent_after_barrier():
    """Bytes that this host's engine has sent so far, once all ranks are here. No rank sends more before all have read:
    pairs of ranks exchange without the others."""
    bagua.barrier()
    sent = bagua.communication.statistics().bytes_sent
    bagua.barrier()
    return sent


def volume(case):
    """Bytes that this host sent per step, once the first steps are over."""
    os.environ[VARIABLE] = "off"
    model, optimizers = wrapped(case, volume_model)
    compare_replicas()
    train = case.train or one_step
    idle = sent_after_barrier() - sent_after_barrier()  # what a barrier itself sends, negative
    # Several periods: what is on its way in the background at the ends of the measurement must weigh little.
    first, steps = case.warm_up, 4 if case.period == 1 else 16 * case.period
    before = 0
    for step in range(first + steps):
        if step == first:
            before = sent_after_barrier()
        train(model, optimizers, volume_loss, bagua.get_rank(), step)
    sent = sent_after_barrier() - before + idle
    model.bagua_ddp.close()
    return sent / steps
