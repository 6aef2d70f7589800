"""Programs that share a model with threads and processes."""

import os
import threading
import warnings
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from habits.case import Plain, gradients, habit, mlp, step, train, weights


@habit(kind=1)
def shares_gradients_with_a_thread(by):
    """A thread copies gradients away while the next pass runs."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
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


@habit(kind=1)
def is_forked(by):
    """A child changes gradients and weights, which are copies of its own: the parent's stay."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    step(by, model, optimizer, 0)
    before = [*weights(net), *gradients(net)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                for one in net.parameters():
                    one.grad.fill_(5.0)
                    one.fill_(7.0)
            net.zero_grad(set_to_none=False)
            net.load_state_dict({name: one + 1 for name, one in net.state_dict().items()})
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    same = [torch.equal(*pair) for pair in zip(before, [*weights(net), *gradients(net)], strict=True)]
    train(by, model, optimizer)
    return {"same": all(same), "weights": weights(net)}


@habit(kind=1, oracle=False, without=("backend",))
def trains_in_a_child(by):
    """A forked child trains its copy, as workers of A3C do. (Under DDP it waits for ever.)"""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
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
                plain.step(lambda net, x: net(x).square().mean(), number)
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
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(6):
        step(by, model, optimizer, number)
        if number % 2:
            ForkingPickler.dumps(net)
            ForkingPickler.dumps([one.grad for one in net.parameters()])
    return {"weights": weights(net)}
