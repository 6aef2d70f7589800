"""Checkpoints of islands in torch's format, by the functions of docs/howto/checkpoints.md.

Islands of another size go on from them, and one whose writer was killed is never loaded."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from rig.docs import pages
from torch.utils.data import TensorDataset
from training_scenarios.support import seeded, shard, wide_mlp, wrap

import bagua.torch_api as bagua
from bagua.base.islands import VARIABLE

SAMPLES, EPOCHS = 48, 4


def of_page():
    """The functions save and load, as they stand there."""
    [program] = [one.text for one in pages.of_page("howto/checkpoints") if one.file == "sharded.py"]
    found = {"__name__": "page"}
    exec(compile(program, "sharded.py", "exec"), found)
    return found["save"], found["load"]


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


write_data = torch.distributed.checkpoint.FileSystemWriter.write_data


def dies(*given):
    write_data(*given).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def rank_trains(folder, epochs, kill=""):
    """Loads, trains to the end of that epoch and saves behind each. ``kill``: "MEMBER:EPOCH", which dies when its files
    are written and the checkpoint is not whole. Returns what was loaded, and what there is at the end."""
    bagua.init_process_group()
    save, load = of_page()
    samples = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sampler = bagua.contrib.ElasticSampler(TensorDataset(samples), global_batch=8)
    model = seeded(wide_mlp, seed=0)
    if bagua.get_island_size() > 1:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder = Path(folder)
    load(folder, model, optimizer, sampler)

    def state():
        found = {name: whole(one) for name, one in model.named_parameters()}
        for name, one in model.named_parameters():
            found |= {f"{name} {key}": whole(value) for key, value in optimizer.state.get(one, {}).items()}
        return found

    begun = sampler.epoch, state()
    wrap(model, optimizer)
    victim, at = map(int, kill.split(":")) if kill else (-1, -1)
    member = bagua.get_rank()
    for epoch in sampler.epochs(epochs):
        for (inputs,) in sampler.loader():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        if (member, epoch) == (victim, at):
            torch.distributed.checkpoint.FileSystemWriter.write_data = dies
        save(folder, model, optimizer, sampler)
    return begun, state()


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=0.0, atol=1e-9, msg=name)


def run(ranks, folder, size, nprocs, epochs):
    ranks.close()  # those of the run before
    ranks.folder = folder.with_name(f"{folder.name}-{size}")  # each job has one: its first world leaves a file there
    for one in (folder, ranks.folder):
        one.mkdir(exist_ok=True)
    return ranks.run(rank_trains, nprocs, folder=str(folder), epochs=epochs, environment={VARIABLE: str(size)})


@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.full), (2, 1), (1, 2)])
def test_islands_of_another_size_go_on(ranks, tmp_path, before, after):
    """With the weights, the optimizer and the samples of a job that was never interrupted."""
    wanted = run(ranks, tmp_path / "one", 1, 2, EPOCHS)[0][1]
    written = run(ranks, tmp_path / "two", before, max(before, 2), EPOCHS - 2)[0][1]
    for (epoch, loaded), found in run(ranks, tmp_path / "two", after, max(after, 2), EPOCHS):
        assert epoch == EPOCHS - 2
        assert_close(loaded, written)
        assert_close(found, wanted)


def test_one_whose_writer_was_killed_is_not_loaded(ranks, tmp_path):
    """A rank of the first island dies when its files of the second checkpoint are written. The other island goes on,
    and writes the next one."""
    folder = tmp_path / "folder"
    folder.mkdir()
    options = {"folder": str(folder), "environment": {VARIABLE: "2"}}
    ranks.start(rank_trains, 4, elastic=True, epochs=3, kill="1:1", **options)
    [(_, written), _] = ranks.left([0, 1])
    assert sorted(one.name for one in folder.iterdir()) == ["epoch-0001", "epoch-0003", "writing-0002"]
    (folder / "writing-0002").rename(folder / "writing-0009")
    for (epoch, loaded), _ in run(ranks, folder, 2, 2, 3):
        assert epoch == 3
        assert_close(loaded, written)
