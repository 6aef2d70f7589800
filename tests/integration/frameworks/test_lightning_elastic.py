"""Lightning in elastic jobs: ranks are lost and newcomers join, in the middle of an epoch of a Trainer."""

import importlib
import os
import signal
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from integration.frameworks.conftest import DEADLINE_S, ranks_with
from rig.files import await_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.torch_api.job.session import current

PRELOAD = ("lightning.pytorch",)
SAMPLES, GLOBAL_BATCH, EPOCHS = 60, 6, 3
STEPS = SAMPLES // GLOBAL_BATCH
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")


def import_lightning():
    """In a rank; its own warnings are no concern of ours."""
    warnings.simplefilter("default")
    import lightning.pytorch

    importlib.import_module("bagua.lightning")
    return lightning.pytorch


def make_module(pytorch, folder, waits, lost=()):
    """Notes each step. ``waits``: a file to be waited for in the step of that number. ``lost``: a step, and the member
    that is killed in it."""

    class Net(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(current().membership.member)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            self.steps = []
            self.validated = []

        def training_step(self, batch, batch_idx):
            step = self.global_step + 1
            (folder / f"step-{step}").touch()
            if str(step) in waits:
                await_file(folder / waits[str(step)])
            if lost == (step, current().membership.member):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            self.now = (self.current_epoch, batch_idx, self.lr_schedulers().get_last_lr()[0], batch[1].tolist())
            return loss

        def on_train_batch_end(self, *_):
            flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])
            self.steps.append((self.global_step, *self.now, list(current().membership.members), flat))

        def validation_step(self, batch, batch_idx):
            self.log("val", self.net(batch[0]).square().mean(), sync_dist=True, on_step=True, on_epoch=True)

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                self.validated.append((self.current_epoch, float(self.trainer.callback_metrics["val_epoch"])))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    return Net()


def make_counter(pytorch):
    """A callback with a state: batches since the job began."""

    class Counter(pytorch.Callback):
        batches = 0

        def on_train_batch_end(self, *_, **__):
            self.batches += 1

        def state_dict(self):
            return {"batches": self.batches}

        def load_state_dict(self, state):
            self.batches = state["batches"]

    return Counter()


def rank_fit(folder, waits):
    """Fits. ``waits["0"]``: a file that is waited for before."""
    pytorch = import_lightning()
    bagua.init_process_group()
    if "0" in waits:
        await_file(Path(folder, waits["0"]))
    newcomer = bagua.is_newcomer()
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(inputs, torch.arange(SAMPLES))
    sampler = bagua.contrib.ElasticSampler(dataset, global_batch=GLOBAL_BATCH)
    model, counter = make_module(pytorch, Path(folder), waits), make_counter(pytorch)
    best = pytorch.callbacks.ModelCheckpoint(dirpath=Path(folder, "kept"), monitor="val_epoch", save_last=True)
    trainer = pytorch.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="bagua",
        max_epochs=EPOCHS,
        callbacks=[counter, best],
        **QUIET,
    )
    trainer.fit(model, sampler.loader(), DataLoader(dataset, 10))
    member = current().membership.member
    seen = {"batches": counter.batches, "best": float(best.best_model_score), "validated": model.validated}
    return {"member": member, "newcomer": newcomer, "steps": model.steps, **seen}


def results_of(ranks, codes):
    """Of ranks that ended well; ``codes``: exit codes of others."""
    ranks.wait(DEADLINE_S)
    found = {one.rank: one.process.returncode for one in ranks.started}
    assert found == {rank: codes.get(rank, 0) for rank in found}, "\n".join(
        f"{one.rank}: {one.process.returncode}\n{one.output}" for one in ranks.started
    )
    return [one.result() for one in ranks.started if one.rank not in codes]


def check(results):
    """All did the same, with the same weights, and each sample was in as many steps as there were epochs. Returns the
    members of each step."""
    members = {}
    alike = {}
    used = []
    for result in results:
        for step, epoch, batch, rate, samples, present, weights in result["steps"]:
            members[step] = present
            same = alike.setdefault(step, (epoch, batch, rate, weights))
            assert same[:3] == (epoch, batch, rate) == ((step - 1) // STEPS, (step - 1) % STEPS, 0.01 * 0.5**epoch)
            assert torch.equal(same[3], weights)
            used += samples
    assert sorted(members) == list(range(1, EPOCHS * STEPS + 1))
    assert sorted(used) == sorted([*range(SAMPLES)] * EPOCHS)
    for name in ("batches", "best"):
        assert len({result[name] for result in results}) == 1, name
    for result in results:
        assert result["validated"] == results[0]["validated"][-len(result["validated"]) :]
    return members


def test_a_newcomer_joins_in_the_middle_of_an_epoch(tmp_path):
    """Epoch, step, learning rate, callbacks and samples go on as if it had been there from the beginning."""
    with ranks_with(tmp_path, PRELOAD) as ranks:
        ranks.start(rank_fit, 2, elastic=True, folder=str(tmp_path), waits={"14": "planned-2"})
        assert ranks.regrouper is not None
        ranks.regrouper.on_plan = lambda generation: (tmp_path / f"planned-{generation}").touch()
        ranks.join(rank_fit, [2], folder=str(tmp_path), waits={"0": "step-14"})
        results = results_of(ranks, {})
    members = check(results)
    assert [members[step] for step in (14, 15, 30)] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    assert [result["newcomer"] for result in results] == [False, False, True]
    assert [len(result["validated"]) for result in results] == [3, 3, 2]
    assert results[2]["batches"] == EPOCHS * STEPS


def rank_with_batch_size():
    pytorch = import_lightning()
    bagua.init_process_group()
    sampler = bagua.contrib.ElasticSampler(TensorDataset(torch.ones(60, 8), torch.arange(60)), 3)
    model = make_module(pytorch, Path("/nowhere"), {})
    trainer = pytorch.Trainer(accelerator="cpu", strategy="bagua", enable_checkpointing=False, **QUIET)
    with pytest.raises(ConfigError, match="give the sampler a global_batch"):
        trainer.fit(model, sampler.loader())
    return "refused"


def rank_lost(folder):
    """Rank 2 is killed in its third step; the others finish the epoch, and stay alike."""
    pytorch = import_lightning()
    bagua.init_process_group()
    model = make_module(pytorch, Path(folder), {}, (3, 2))
    trainer = pytorch.Trainer(
        accelerator="cpu", devices=3, strategy="bagua", max_epochs=1, enable_checkpointing=False, **QUIET
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(90, 8), torch.arange(90)), 5))
    assert trainer.strategy.world_size == 2
    return {"steps": model.steps}


def test_a_rank_is_lost(tmp_path):
    """With an ordinary loader, whose shares stay as they are in this epoch."""
    with ranks_with(tmp_path, PRELOAD) as ranks:
        ranks.start(rank_lost, 3, elastic=True, folder=str(tmp_path))
        first, second = (result["steps"] for result in results_of(ranks, {2: -9}))
    assert len(first) == len(second) == 6
    assert torch.equal(first[-1][-1], second[-1][-1])


def test_epochs_that_would_get_longer_are_refused(tmp_path):
    with ranks_with(tmp_path, PRELOAD) as ranks:
        assert ranks.start(rank_with_batch_size, 1, elastic=True)
        assert results_of(ranks, {}) == ["refused"]
