"""Programs with several passes a step, or other passes than one of the whole model."""

import collections

import torch
from habits.case import habit, mlp, square, state, step, train, weights, wrapped
from torch import nn


@habit(kind=1)
def accumulates_without_sync(by):
    """Several passes, of which the last one is exchanged; gradients are changed between them."""
    net, model, optimizer = wrapped(by)
    for number in range(3):
        optimizer.zero_grad()
        for part in range(2):
            with by.no_sync(model):
                square(model, by.batch(10 * number + part)).backward()
            for one in net.parameters():
                one.grad *= 0.5
        square(model, by.batch(10 * number + 2)).backward()
        optimizer.step()
    return state(net)


@habit(kind=1)
def replaces_what_it_accumulates(by):
    """Between passes that accumulate, some gradients become new tensors, None, or have other data."""
    net, model, optimizer = wrapped(by)
    for number in range(3):
        optimizer.zero_grad()
        with by.no_sync(model):
            model(by.batch(10 * number)).square().mean().backward()
        net[0].weight.grad = net[0].weight.grad * 0.5
        net[0].bias.grad.data = net[0].bias.grad.data * 0.5
        net[2].weight.grad = None
        model(by.batch(10 * number + 1)).square().mean().backward()
        optimizer.step()
    return state(net)


@habit(kind=1)
def climbs_and_steps(by):
    """SAM: a pass at the weights, another one beside them, whose gradients are used."""
    net, model, optimizer = wrapped(by)
    for number in range(3):
        optimizer.zero_grad()
        square(model, by.batch(number)).backward()
        norm = torch.stack([one.grad.norm() for one in net.parameters()]).norm()
        climbs = [0.05 * one.grad / norm for one in net.parameters()]
        kept = [one.grad for one in net.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), climbs)
        optimizer.zero_grad()
        square(model, by.batch(number)).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), climbs)
            for one, first in zip(net.parameters(), kept, strict=True):
                one.grad.add_(first, alpha=0.1)
        optimizer.step()
    return {"weights": weights(net)}


@habit(kind=1, without=("local_sgd", "decentralized", "async"))
def calls_a_closure(by):
    """LBFGS, which keeps the last gradient and direction."""
    net, _ = mlp()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.2, max_iter=3)
    model = by.wrap(net, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(by.batch(0)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return {"weights": weights(net)}


@habit(kind=1)
def scales_its_loss(by):
    """GradScaler, with clipping in between and a step that overflows on one rank."""
    net, model, optimizer = wrapped(by)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for number in range(5):
        optimizer.zero_grad()
        loss = model(by.batch(number)).square().mean()
        if number == 2 and by.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return {"scale": scaler.get_scale() if by.exact else 0.0, "weights": weights(net)}


@habit(kind=1)
def changes_gradients_in_hooks(by):
    """Hooks of tensors that return new gradients, from before the model is wrapped and after."""
    net, optimizer = mlp()
    net[0].weight.register_hook(lambda gradient: gradient * 2)
    model = by.wrap(net, optimizer)
    net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    net[2].bias.register_hook(lambda gradient: None)
    for number in range(3):
        step(by, model, optimizer, number)
    return state(net)


@habit(kind=1)
def leaves_parameters_out(by):
    """Another part of the model is used in each step, and another one on each rank."""
    torch.manual_seed(0)
    net = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = by.wrap(net, optimizer, find_unused_parameters=True)
    for number in range(6):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        model(by.batch(number), (number + by.rank * (number > 3)) % 3).square().mean().backward()
        optimizer.step()
    return {"weights": weights(net)}


class Branches(nn.Module):
    """Three layers, of which one is used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, which):
        return self.layers[which](x)


@habit(kind=1)
def trains_two_models_in_turns(by):
    """A GAN: the second model is frozen while the first one trains through it."""
    (maker, of_maker), (judge, of_judge) = mlp(), mlp()
    makes, judges = by.wrap(maker, of_maker), by.wrap(judge, of_judge)
    for number in range(3):
        judge.requires_grad_(True)
        of_judge.zero_grad()
        fake = torch.cat([makes(by.batch(number))] * 2, 1).detach()
        (judges(fake).mean() - judges(by.batch(20 + number)).mean()).backward()
        of_judge.step()
        judge.requires_grad_(False)
        of_maker.zero_grad()
        (-judges(torch.cat([makes(by.batch(40 + number))] * 2, 1))).mean().backward()
        of_maker.step()
    return {"weights": [*weights(maker), *weights(judge)]}


@habit(kind=1)
def uses_another_optimizer(by):
    """An optimizer that was made after the model was wrapped, with groups that came later."""
    net, model, optimizer = wrapped(by)
    train(by, model, optimizer, 2)
    other = torch.optim.AdamW(net[0].parameters(), lr=0.01)
    train(by, model, other, 2)
    other.add_param_group({"params": net[2].parameters(), "lr": 0.02})
    train(by, model, other, 2)
    other.load_state_dict(other.state_dict())
    train(by, model, other, 2)
    return {"weights": weights(net)}


class Lookahead(torch.optim.Optimizer):
    """As it is found in repositories: ``Optimizer.__init__`` is not called."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = collections.defaultdict(dict)
        self.count = 0

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        for one in self.param_groups[0]["params"] if self.count % 2 else ():
            slow = self.state[one].setdefault("slow", one.detach().clone())
            slow += 0.5 * (one.detach() - slow)
            one.data.copy_(slow)
        return loss


@habit(kind=1)
def steps_through_a_wrapper(by):
    """An optimizer around another one."""
    net, optimizer = mlp()
    wrapper = Lookahead(optimizer)
    model = by.wrap(net, wrapper)
    train(by, model, wrapper, 4)
    return {"weights": weights(net)}


@habit(kind=1)
def steps_in_place_of_the_optimizer(by):
    """``p.data -= lr * p.grad``, and no optimizer's step."""
    net, model, _ = wrapped(by)
    for number in range(4):
        square(model, by.batch(number)).backward()
        for one in net.parameters():
            one.data -= 0.1 * one.grad
            one.grad = None
    return {"weights": weights(net)}


@habit(kind=1)
def frees_models(by):
    """Models are wrapped, trained and dropped, one after the other."""
    found = []
    for _ in range(4):
        net, optimizer = mlp()
        model = by.wrap(net, optimizer)
        train(by, model, optimizer, 2)
        found.append(weights(net))
        del model, net, optimizer
    return {"weights": found}


@habit(kind=2)
def runs_forward_alone(by):
    """A thousand forward passes in training mode, of which few are followed by a backward pass."""
    net, model, optimizer = wrapped(by)
    for number in range(1000):
        loss = model(by.batch(number % 7)).square().mean()
        if number % 250 == 0:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"weights": weights(net)}
