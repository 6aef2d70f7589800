"""Checkpoints in the background: a job that goes on from one has the bits of a job that never stopped, with another
number of ranks, too, or when ranks were lost or joined; and checkpoints that are damaged, or half written."""

import os
import resource
import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rig.checkpoints import WIDTH, Net, await_true, folder_of
from rig.ranks.faults import kill_self
from torch import nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.saving import folder as on_disk


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = bagua.moe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 1, k=1)

    def forward(self, inputs):
        found, loss, _ = self.layer(inputs)
        return found + 0.1 * loss


def run(ranks, function, number, **arguments):
    found = ranks.run(function, number, **arguments)
    ranks.close()
    return found


def flat(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def state_of(model, optimizer):
    found = [tensor.detach().double().flatten() for tensor in [*model.parameters(), *model.buffers()]]
    for parameter in model.parameters():
        found += [
            one.double().flatten() for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor)
        ]
    return torch.cat([*found, torch.rand(1).double()])


def rank_trains(folder, steps, algorithm, options):
    bagua.init_process_group()
    torch.manual_seed(17 + bagua.get_rank())
    experts, fused = options == {"experts": True}, options == {"fused": True}
    model = Experts() if experts else Net()
    if algorithm == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.with_bagua([optimizer], Algorithm.init(algorithm, **({} if experts or fused else options)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=3, keep=2, schedulers=[scheduler])
    start = checkpointer.resume()
    make_step = bagua.contrib.fuse_optimizer(optimizer).fuse_step if fused else optimizer.step
    while checkpointer.steps < steps:
        optimizer.zero_grad()
        inputs = torch.randn(6, WIDTH)
        model(inputs).sub(inputs).square().mean().backward()
        make_step()
        scheduler.step()
        checkpointer.step()
    found = state_of(model, optimizer)
    bagua.communication.destroy_process_group()
    return start.step if start else 0, found


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("power_sgd", {"rank": 1}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("gradient_allreduce", {}),
                ("gradient_allreduce", {"experts": True}),
                ("gradient_allreduce", {"fused": True}),
                ("local_sgd", {"interval": 2}),
                ("diloco", {"interval": 2}),
                ("decentralized", {"peer_selection_mode": "all"}),
                ("low_precision_decentralized", {}),
                ("qadam", {}),
                ("top_k", {"density": 0.1, "everywhere": True}),
            )
        ),
    ],
)
def test_continues_with_the_same_bits(ranks, tmp_path, algorithm, options):
    def train(folder, steps):
        arguments = {"folder": str(tmp_path / folder), "steps": steps, "algorithm": algorithm, "options": options}
        return run(ranks, rank_trains, 2, **arguments)

    whole = train("whole", 8)
    train("cut", 7)
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["step_0000000003", "step_0000000006"]
    again = train("cut", 8)
    assert [start for start, _ in again] == [6, 6]
    for (_, wanted), (_, found) in zip(whole, again, strict=True):
        assert torch.equal(wanted, found)


def rank_counts(folder, steps, sampler, every, **sizes):
    """Trains; returns which samples it used in which step."""
    bagua.init_process_group()
    data = TensorDataset(torch.randn(42, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(42))
    if sampler == "elastic":
        elastic = bagua.contrib.ElasticSampler(data, **sizes)
        epochs, loader = elastic.epochs(100), elastic.loader()
    else:
        balanced = bagua.contrib.LoadBalancingDistributedSampler(data, [float(i % 5) for i in range(42)])
        epochs, loader = iter(range(100)), torch.utils.data.DataLoader(data, batch_size=2, sampler=balanced)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=every)
    checkpointer.resume()
    used = []
    for epoch in epochs:
        if sampler != "elastic":
            if epoch < balanced.epoch:
                continue
            balanced.set_epoch(epoch)
        for inputs, indices in loader:
            optimizer.zero_grad()
            model(inputs.repeat(2, 1)).square().mean().backward()
            optimizer.step()
            checkpointer.step()
            used.append((checkpointer.steps, epoch, indices.tolist()))
            if checkpointer.steps == steps:
                checkpointer.wait()
                return used
    raise AssertionError("there were too few samples")


@pytest.mark.parametrize(
    ("sampler", "sizes", "worlds", "cuts", "elastic"),
    [
        ("elastic", {"global_batch": 6}, (2, 3, 1), (4, 10, 21), False),
        ("elastic", {"batch_size": 3}, (3, 2), (4, 12), True),
        ("balanced", {}, (2, 3), (3, 11), False),
    ],
)
def test_each_sample_is_used_once(ranks, tmp_path, sampler, sizes, worlds, cuts, elastic):
    """Each run has another number of ranks. It goes on for a step after its last checkpoint: that one is done again."""
    counted, begun = Counter(), 0
    for number, cut in zip(worlds, cuts, strict=True):
        steps = cut if cut == cuts[-1] else cut + 1
        arguments = {"folder": str(tmp_path / "c"), "steps": steps, "sampler": sampler, "every": cut}
        found = run(ranks, rank_counts, number, elastic=elastic, **arguments, **sizes)
        assert all(used[0][0] == begun + 1 for used in found), "it did not go on from the checkpoint"
        for step, epoch, indices in [one for used in found for one in used]:
            if step <= cut:
                counted.update((epoch, index) for index in indices)
        begun = cut
    whole = [epoch for epoch in range(3) if sum(which == epoch for which, _ in counted) == 42]
    assert whole, "no epoch was finished"
    assert all(counted[epoch, index] == 1 for epoch in whole for index in range(42))
    assert max(counted.values()) == 1


def rank_begins(name, **arguments):
    """Runs a function in a job that ends with it."""
    bagua.init_process_group()
    found = globals()[name](**arguments)
    bagua.communication.destroy_process_group()
    return found


def rank_keeps_time(folder):
    """Returns after how many steps there was a checkpoint."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=timedelta(seconds=0.3), keep=1)
    while True:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if checkpointer.step():
            checkpointer.wait()
            return checkpointer.steps


def test_ranks_agree_on_the_time(ranks, tmp_path):
    found = ranks.run(rank_begins, 2, name="rank_keeps_time", folder=str(tmp_path / "c"))
    assert found == [found[0]] * 2
    assert [path.name for path in on_disk.checkpoints(tmp_path / "c")] == [folder_of(found[0])]


def rank_grows(folder, steps, algorithm):
    """Parameters after it has resumed, and at the end."""
    torch.manual_seed(5)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.with_bagua([optimizer], Algorithm.init(algorithm))
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=steps)
    start = checkpointer.resume()
    begun = model.weight.detach().clone()
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 10 + bagua.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        checkpointer.step()
    return start.ranks if start else 0, begun, model.weight.detach().clone()


@pytest.mark.parametrize(
    ("algorithm", "then"),
    [
        ("decentralized", ""),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("gradient_allreduce", ""),
                ("low_precision_decentralized", ""),
                ("async", ""),
                ("decentralized", "diloco"),
            )
        ),
    ],
)
def test_another_number_of_ranks(ranks, tmp_path, algorithm, then):
    """Newcomers, and who begins anew, or by another algorithm where replicas were different ones, have rank 0's."""
    ends = []
    for number in (2, 2) if then else (2, 3, 1):
        arguments = {"folder": str(tmp_path / "c"), "steps": 3, "algorithm": then if then and ends else algorithm}
        found = run(ranks, rank_begins, number, name="rank_grows", **arguments)
        for rank, (before, begun, _) in enumerate(found) if ends else ():
            assert before == len(ends)
            own = algorithm == "decentralized" and not then and rank < len(ends)
            assert torch.equal(begun, ends[rank if own else 0])
        ends = [end for _, _, end in found]


def rank_loses(folder, steps, dies=0, ranks=1):
    """In an elastic job. ``dies``: in that step the last rank is killed. It goes on until so many ``ranks`` have done a
    step together, and then until the number of its steps is a multiple of ``steps``."""
    bagua.init_process_group()
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=2)
    resumed = checkpointer.resume() is not None
    trained = ranks if resumed else 0
    while True:
        bagua.wait_to_join()
        if trained >= ranks and checkpointer.steps and checkpointer.steps % steps == 0:
            break
        trained = bagua.get_world_size()
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        if dies and checkpointer.steps + 1 == dies and bagua.get_rank() == bagua.get_world_size() - 1:
            checkpointer.wait()
            kill_self()
        checkpointer.step()
    bagua.communication.destroy_process_group()
    return checkpointer.steps, resumed, flat(model)


def test_a_rank_is_lost(ranks, tmp_path):
    """Its checkpoint is given up, in words; the next one is that of the ranks that are left."""
    folder = tmp_path / "c"
    found = ranks.survive(rank_loses, (2,), 3, folder=str(folder), steps=6, dies=4)
    told = ranks.started[0].output
    ranks.close()
    assert torch.equal(found[0][2], found[1][2])
    sizes = {path.name: on_disk.read_manifest(path).ranks for path in on_disk.checkpoints(folder)}
    assert sizes == {folder_of(2): 3, folder_of(6): 2}
    assert "There is no checkpoint of step 4" in told and "rank 2 was lost before its part was written" in told
    again = ranks.survive(rank_loses, (), 2, folder=str(folder), steps=6)
    assert all(resumed and torch.equal(mine, found[0][2]) for _, resumed, mine in again)


def test_a_rank_joins(ranks, tmp_path):
    """It takes over how many steps there were, and writes its share of the next checkpoint."""
    folder = tmp_path / "c"
    ranks.start(rank_loses, 2, elastic=True, folder=str(folder), steps=6, ranks=3)
    await_true((folder / folder_of(2)).exists)
    ranks.join(rank_loses, [2], folder=str(folder), steps=6, ranks=3)
    found = ranks.left()
    assert [(steps, resumed) for steps, resumed, _ in found] == [(found[0][0], False)] * 3
    assert all(torch.equal(mine, found[0][2]) for _, _, mine in found)
    newest = on_disk.checkpoints(folder)[0]
    assert newest.name == folder_of(found[0][0]) and on_disk.read_manifest(newest).ranks == 3


def rank_tells(folder, width=WIDTH, states=False, limit=0, adam=False):
    """(the error of resuming or the step, checkpoints that failed)"""
    torch.manual_seed(3)
    model = Net(width)
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    if states:
        bagua.register_state("more", torch.optim.lr_scheduler.StepLR(optimizer, 2))
    checkpointer = None
    try:
        checkpointer = bagua.checkpoint.Checkpointer(folder, every=1, keep=3)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        start = checkpointer.resume()
        text = str(start.step) if start else "none"
        for step in range(3):
            if step == 2 and limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            model(torch.randn(4, width)).sum().backward()
            optimizer.step()
            checkpointer.step()
            checkpointer.wait()
    except BaguaError as error:
        text, checkpointer = str(error), None
    return text, checkpointer.failed if checkpointer else 0


def test_bad_checkpoints_and_folders(ranks, tmp_path):
    folder = tmp_path / "c"

    def resume(at=folder, **arguments):
        text, failed = run(ranks, rank_begins, 1, name="rank_tells", folder=str(at), **arguments)[0]
        names = sorted(path.name for path in at.iterdir()) if at.is_dir() else []
        return text, names, failed, (tmp_path / "rank-0.log").read_text()

    text, names, failed, _ = resume()
    assert (text, names, failed) == ("none", [folder_of(1), folder_of(2), folder_of(3)], 0)

    data = next((folder / folder_of(3)).glob("__0_*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    metadata = folder / folder_of(2) / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-7])
    text, names, failed, told = resume()
    assert (text, failed) == ("1", 0)
    assert names == [f"damaged-{folder_of(2)}", f"damaged-{folder_of(3)}", folder_of(2), folder_of(3), folder_of(4)]
    assert f"{folder_of(3)} is damaged: the contents of {data.name} have changed" in told
    assert f"{folder_of(2)} is damaged: .metadata has" in told and "The one before is taken" in told

    assert "is a checkpoint of another program. Its model 1 differs." in resume(width=4)[0]
    assert "this program has model 1, state more" in resume(states=True)[0]
    text = resume(adam=True)[0]
    assert "Of its optimizers the checkpoint has [['SGD'," in text and "this program has [['Adam'," in text

    for number in (2, 3, 4):
        (folder / folder_of(number) / "bagua.json").unlink()
    text = resume()[0]
    assert "No checkpoint in" in text and f"{folder_of(4)}: it has no bagua.json" in text and "another folder" in text

    (tmp_path / "file").touch()
    assert "Checkpoints can't be written into" in resume(tmp_path / "file" / "c")[0]

    text, names, failed, told = resume(tmp_path / "full", limit=3000)
    assert (text, names, failed) == ("none", [folder_of(3)], 2), "training goes on, and the next one is written"
    assert "There is no checkpoint of step 1" in told and "Training goes on" in told


def rank_writes(folder, again=False, steps=10**6):
    """A model whose weights are all the number of the step, and whose optimizer's state is large."""
    bagua.init_process_group()
    model = nn.Linear(1 << 14, 16, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=1, keep=2)
    if again:
        start = checkpointer.resume()
        assert start is not None and bool((model.weight == -float(start.step)).all())
    while checkpointer.steps < steps:
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        checkpointer.step()
    bagua.communication.destroy_process_group()
    return checkpointer.steps, model.weight[0, 0].item()


@pytest.mark.parametrize("victims", [(0, 1), pytest.param((1,), marks=pytest.mark.full)])
def test_killed_in_the_middle_of_writing(ranks, tmp_path, victims):
    folder = tmp_path / "c"
    ranks.start(rank_writes, 2, folder=str(folder))

    def half_written():
        writing = [path for path in folder.glob("writing-*") if not (path / "bagua.json").exists()]
        return len(on_disk.checkpoints(folder)) > 1 and any(any(one.glob("__*")) for one in writing)

    await_true(half_written)
    for victim in victims:
        os.kill(ranks.started[victim].process.pid, signal.SIGKILL)
    ranks.wait()
    ranks.close()
    newest = on_disk.checkpoints(folder)[0]
    manifest = on_disk.read_manifest(newest)
    on_disk.verify(newest, manifest, manifest.files)
    end = manifest.step + 2
    assert ranks.run(rank_writes, 2, folder=str(folder), again=True, steps=end) == [(end, -float(end))] * 2
    left = sorted(path.name for path in folder.iterdir())
    assert left == [folder_of(end - 1), folder_of(end)], "nothing is left over"


def rank_forgets(folder):
    bagua.init_process_group()
    torch.manual_seed(2)
    model = nn.Linear(300, 2000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(every=1)  # the folder is that of --checkpoint-dir
    with pytest.raises(BaguaError, match="There is a Checkpointer already"):
        bagua.checkpoint.Checkpointer(folder)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    told = ""
    try:
        checkpointer.step()
    except BaguaError as error:
        told = str(error)
    torch.save(model.state_dict(), Path(folder, "model"))
    torch.save(optimizer.state_dict(), Path(folder, "optimizer"))
    bagua.communication.destroy_process_group()
    return told


def test_plain_torch_reads_it(ranks, tmp_path):
    """The form is that of torch.distributed.checkpoint. Also: a folder from the environment; a run that does not resume
    is refused; each tensor is there once."""
    folder, environment = tmp_path / "c", {"BAGUA_CHECKPOINT_DIR": str(tmp_path / "c")}
    assert run(ranks, rank_forgets, 3, folder=str(tmp_path), environment=environment) == [""] * 3
    whole = torch.load(tmp_path / "model")
    moments = torch.load(tmp_path / "optimizer")["state"]
    told = run(ranks, rank_forgets, 1, folder=str(tmp_path), environment=environment)
    assert "has checkpoints of an earlier run. Call resume()" in told[0]

    at = folder / folder_of(1)
    sizes = [(at / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert sum(sizes) < 3.1 * whole["weight"].nbytes, "weights, and two moments"
    assert max(sizes) < 1.2 * min(sizes)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # takes two seconds of a core to import

    dcp_to_torch_save(at, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(saved["model"][name], one) for name, one in whole.items())
    for number, name in enumerate(whole):
        assert all(torch.equal(saved["optimizer"]["state"][name][key], one) for key, one in moments[number].items())
    assert saved["bagua"]["job"]["model 1"]["model"]["steps"] == 1
