"""Programs that share a model with threads and processes."""

import os
import threading
import warnings
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from habits.case import Plain, habit, mlp, square, step, train, weights, wrapped


@habit(kind=1)
def shares_gradients_with_a_thread(by):
    """A thread copies gradients away while the next pass runs."""
    net, model, optimizer = wrapped(by)
    copies = []
    for number in range(3):
        step(by, model, optimizer, number)
        kept = [one.grad for one in net.parameters()]
        go = threading.Event()

        def copy(kept=kept, go=go):
            go.wait()
            copies.extend(one.clone() for one in kept)

        thread = threading.Thread(target=copy)
        thread.start()
        optimizer.zero_grad()
        model(by.batch(10 + number)).square().mean().backward()
        go.set()
        thread.join()
    return {"copies": copies, "weights": weights(net)}


@habit(kind=1, oracle=False, without=("backend",))
def trains_in_a_child(by):
    """A forked child trains its copy, as workers of A3C do. (Under DDP it waits for ever.)"""
    net, model, optimizer = wrapped(by)
    step(by, model, optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            plain = Plain(by, net)
            plain.ranks = range(by.rank, by.rank + 1)
            for number in range(2):
                step(by, net, optimizer, number)
                plain.step(square, number)
            code = 0 if plain.agrees(net) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    train(by, model, optimizer)
    same = all(torch.allclose(by.mean(one), one, atol=1e-6) for one in net.parameters())
    return {"code": code == 0, "same": same} if by.exact else {"code": code == 0}


@habit(kind=1)
def is_shared_before(by):
    """``share_memory()`` before the model is wrapped: other processes go on seeing the weights."""
    net, optimizer = mlp()
    net.share_memory()
    seen = [one.detach() for one in net.parameters()]
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 5)
    return {
        "shared": all(one.is_shared() for one in net.parameters()),
        "seen": all(torch.equal(one, other) for one, other in zip(seen, net.parameters(), strict=True)),
        "weights": weights(net),
    }


@habit(kind=1)
def is_passed_to_a_process(by):
    """The model as an argument of a process that is spawned: its tensors, and gradients, move into shared memory."""
    net, model, optimizer = wrapped(by)
    for number in range(6):
        step(by, model, optimizer, number)
        if number % 2:
            ForkingPickler.dumps(net)
            ForkingPickler.dumps([one.grad for one in net.parameters()])
    return {"weights": weights(net)}
