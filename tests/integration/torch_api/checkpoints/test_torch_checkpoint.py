"""Checkpoints in the original's layout: what they hold, other numbers of ranks, damage."""

from pathlib import Path

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint

WIDTH = 4


class Net(nn.Module):
    """Two layers of experts, with different numbers on a rank; 4 and 8 in all."""

    def __init__(self, local):
        super().__init__()
        self.first = bagua.moe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), local, k=2, eval_capacity_factor=8.0)
        self.second = bagua.moe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2 * local, eval_capacity_factor=8.0)

    def forward(self, inputs):
        return inputs + self.second(inputs + self.first(inputs)[0])[0]


def make(local, seed=0):
    torch.manual_seed(seed)
    model = Net(local) if local else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(trained, steps, seed):
    model, optimizer, schedule = trained
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed + step))
        model(inputs).square().sum().backward()
        optimizer.step()
        schedule.step()


def answers(model):
    model.eval()
    found = model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(9))).detach()
    model.train()
    return found


def momentum(trained):
    """Sums over all ranks and parameters of experts, and the same of the shared ones here."""
    states = {True: 0.0, False: 0.0}
    for parameter in trained[0].parameters():
        state = trained[1].state[parameter]
        states[bagua.moe.is_moe_param(parameter)] += (state["exp_avg"].sum() * state["step"]).item()
    found = torch.tensor([states[True], states[False]], dtype=torch.float64)
    if bagua.communication.is_initialized():
        bagua.allreduce_inplace(found[:1])
    return found


def rank_saves(folder):
    bagua.init_process_group()
    trained = make(1, seed=bagua.get_rank())
    trained[0].with_bagua([trained[1]])
    train(trained, 2, bagua.get_rank() * 100)
    save_checkpoint(2, folder, *trained)
    train(trained, 1, bagua.get_rank() * 100)
    save_checkpoint(3, folder, *trained)
    save_checkpoint(3, folder, *trained)
    return answers(trained[0]), momentum(trained)


def rank_loads(folder, local):
    bagua.init_process_group()
    trained = make(local, seed=50)
    assert load_checkpoint(folder, *trained) == 3
    assert trained[2].last_epoch == 3
    found = answers(trained[0]), momentum(trained)
    trained[0].with_bagua([trained[1]])
    train(trained, 1, 0)
    wrong = Net(3)
    with pytest.raises(BaguaError, match=r"has 4 experts in first.bagua_moe.*this model has 3 on each of \d ranks"):
        load_checkpoint(folder, wrong)
    return found


def test_experts_on_other_numbers_of_ranks(ranks, tmp_path):
    folder = tmp_path / "checkpoints"
    saved, moments = ranks.run(rank_saves, hosts=[[0, 1], [2, 3]], folder=str(folder))[0]
    files = sorted(path.name for path in (folder / "iter_0000003").iterdir())
    assert len(files) == 1 + 8 + 4 and files[-1] == "mp_rank_00_model_states.pt"
    assert files[0] == "expert_0_mp_rank_00_model_states.pt"
    assert files[8] == "expert_parallel_rank_0_mp_rank_00_optim_states.pt"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["iter_0000002", "iter_0000003"]
    for n, local in ((2, 2), (1, 4)):
        ranks.close()
        for found, again in ranks.run(rank_loads, n, folder=str(folder), local=local):
            torch.testing.assert_close(found, saved)
            torch.testing.assert_close(again, moments)


def test_without_experts_and_without_a_job(tmp_path):
    trained, other = make(0), make(0, seed=1)
    assert load_checkpoint(tmp_path / "none", *other) == 0
    train(trained, 3, 0)
    save_checkpoint(7, tmp_path / "new" / "folder", *trained)
    assert load_checkpoint(tmp_path / "new" / "folder", *other) == 7
    train(trained, 2, 5), train(other, 2, 5)
    for one, same in zip(trained[0].state_dict().values(), other[0].state_dict().values(), strict=True):
        assert torch.equal(one, same)
    assert trained[2].get_last_lr() == other[2].get_last_lr()

    save_checkpoint(8, tmp_path, trained[0])
    with pytest.raises(BaguaError, match="has no state of optimizer: load it with optimizer=None"):
        load_checkpoint(tmp_path, *other)
    larger = nn.Sequential(*make(0)[0], nn.Linear(WIDTH, 1))
    with pytest.raises(BaguaError, match=r"(?s)iter_0000008 is a checkpoint of another model.*2\.weight"):
        load_checkpoint(tmp_path, larger)
    assert load_checkpoint(tmp_path, larger, strict=False) == 8


def test_numbers_of_numpy(tmp_path):
    numpy = pytest.importorskip("numpy")
    trained, other = make(0), make(0, seed=1)
    trained[1].param_groups[0] |= {"lr": numpy.float64(0.125), "betas": (numpy.float32(0.5), 0.75), "eps": 2.0**-10}
    trained[0](torch.randn(8, WIDTH)).square().sum().backward()
    trained[1].step()
    save_checkpoint(1, tmp_path, trained[0], trained[1])
    file = tmp_path / "iter_0000001" / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=True)["optimizer"]["param_groups"][0]
    assert type(saved["lr"]) is float and [type(one) for one in saved["betas"]] == [float, float]
    assert type(trained[1].param_groups[0]["lr"]) is numpy.float64, "the program's own is as it was"
    for written_by_the_original in (False, True):
        if written_by_the_original:
            states = {"iteration": 1, "model": trained[0].state_dict(), "optimizer": trained[1].state_dict()}
            torch.save(states, file)
        assert load_checkpoint(tmp_path, other[0], other[1]) == 1
        group = other[1].param_groups[0]
        assert group["lr"] == 0.125 and group["betas"] == (0.5, 0.75)
        other[1].param_groups[0]["lr"] = 1.0


class Schedule:
    """With a state that ``load_checkpoint`` would refuse."""

    def state_dict(self):
        return {"path": Path("somewhere")}


@pytest.mark.skipif(
    not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"), reason="this torch can't look into files"
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    trained = make(0)
    save_checkpoint(1, tmp_path, trained[0])
    with pytest.raises(BaguaError, match=r"No checkpoint was written.*a state holds pathlib.*BG710"):
        save_checkpoint(2, tmp_path, trained[0], None, Schedule())
    assert load_checkpoint(tmp_path, trained[0]) == 1


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Malicious:
    def __reduce__(self):
        return exec, ("raise SystemExit('code in a checkpoint was run')",)


FILE, LATEST = "iter_0000001/mp_rank_00_model_states.pt", "latest_checkpointed_iteration.txt"


def test_damage(tmp_path):
    trained = make(0)
    for damage, words in (
        (lambda: cut(tmp_path / FILE), "can't be read, it may have been cut"),
        (lambda: (tmp_path / FILE).write_bytes(b""), "can't be read"),
        (lambda: (tmp_path / FILE).unlink(), "is missing: the checkpoint"),
        (lambda: (tmp_path / LATEST).write_text("x"), "must be the number of an"),
        (lambda: (tmp_path / LATEST).write_bytes(b"\xff\xfe\0"), "must be the number"),
        (lambda: torch.save({}, tmp_path / FILE), "no state of the model"),
        (lambda: torch.save(Malicious(), tmp_path / FILE), "can't be read"),
    ):
        save_checkpoint(1, tmp_path, *trained)
        damage()
        with pytest.raises(BaguaError, match=words):
            load_checkpoint(tmp_path, *trained)


def test_the_last_one_stays(tmp_path, monkeypatch):
    trained = make(0)
    save_checkpoint(1, tmp_path, *trained)
    wanted = answers(trained[0])
    train(trained, 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
        for iteration in (1, 2):
            with pytest.raises(BaguaError, match=r"No checkpoint was written into .*no space left"):
                save_checkpoint(iteration, tmp_path, *trained)
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000001.old")  # killed while it was replaced
    assert load_checkpoint(tmp_path, *trained) == 1
    torch.testing.assert_close(answers(trained[0]), wanted)
    save_checkpoint(1, tmp_path, *trained)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000001", "iter_0000002.new"]
