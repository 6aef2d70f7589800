"""The order in which buckets go, and what is told about their times."""

import json

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.communication import statistics
from bagua.torch_api.train.agreement import gather_texts
from training_scenarios.support import batch, check_close, compare, mlp, scenario, seeded, wrap

ORDERS = ([2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0])


class Parallel(nn.Module):
    """Branches side by side: gradients come in the opposite of the order in which forward computes them."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))

    def forward(self, x, order):
        found = {number: torch.tanh(self.branches[number](x)) for number in order}
        return torch.stack([found[number] for number in sorted(found)]).sum(0)


def branches_in_buckets(model):
    """Numbers of branches in the order in which buckets hold them."""
    names = [slot.name for bucket in model.bagua_buckets for slot in bucket.entries]
    return list(dict.fromkeys(int(name.split(".")[1]) for name in names))


def in_different_orders(model, rank, step):
    """Every rank has another order; branch 4 is used by none."""
    return model(batch(rank, step, 6, 10), ORDERS[(rank + step) % len(ORDERS)]).square().mean()


@scenario
def order_of_arrival():
    model = compare(Parallel, in_different_orders)
    wanted = [1, 3, 0, 2, 4]  # rank 0's in the first step; the branch without a gradient comes last
    mine = json.dumps([slot.name for bucket in model.bagua_buckets for slot in bucket.entries]).encode()
    assert branches_in_buckets(model) == wanted
    assert set(gather_texts(mine, model.bagua_ddp._group)) == {mine}

    # Passes that do not synchronise are not the first one, and what they accumulated takes part.
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for flat in (True, False):
        reference, model = seeded(Parallel), wrap(seeded(Parallel), do_flatten=flat)
        for step in (1, 0):
            sum(in_different_orders(reference, other, step) / n for other in range(n)).backward()
        with model.bagua_ddp.no_sync():
            in_different_orders(model, rank, 1).backward()
        assert branches_in_buckets(model) == [4, 3, 2, 1, 0]
        in_different_orders(model, rank, 0).backward()
        assert branches_in_buckets(model) == wanted
        check_close(model, reference)


@scenario
def statistics_add_up():
    before, steps = statistics(), []
    compare(mlp, steps=3, between=lambda model: steps.append(statistics()))
    after = statistics()
    assert after.steps == before.steps + 3
    assert after.comm_seconds > before.comm_seconds and after.bytes_local > before.bytes_local
    assert 0 <= after.hidden_share <= 1
    newest = steps[1::2]  # of the wrapped model; the others belong to the reference
    for name in ("compute_seconds", "exposed_seconds", "hidden_seconds"):
        assert all(getattr(one.last_step, name) >= 0 for one in newest)
        added = sum(getattr(one.last_step, name) for one in newest)
        assert getattr(after, name) - getattr(before, name) == pytest.approx(added, abs=1e-7)
    assert after.comm_seconds == pytest.approx(after.exposed_seconds + after.hidden_seconds)
    assert after.last_step == newest[-1].last_step
    assert after.last_step.step_seconds == after.last_step.compute_seconds + after.last_step.exposed_seconds
