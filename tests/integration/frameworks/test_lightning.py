"""Lightning: BaguaStrategy gives the same losses, bit by bit, as DDPStrategy on Gloo, and so does backend "bagua".

All scenarios run on the same two ranks, one after the other: many Trainers in one process.
"""

import functools
import gc
import os
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig.docs import page_parts
from rig.ranks.scenarios import check_passed
from torch import distributed, nn

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.job.environment import find_free_network_port
from bagua.torch_api.job.session import current

PRELOAD = ("lightning.pytorch",)
BATCHES, BATCH = 6, 8
PATIENCE_S = 60.0
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}


def import_lightning():
    """In a rank; its own warnings are no concern of ours."""
    warnings.simplefilter("default")
    import lightning.pytorch

    import bagua.lightning  # noqa: F401

    return lightning.pytorch


def make_model(optimizer=lambda p: torch.optim.AdamW(p, 1e-2), manual=False):
    """A LightningModule that keeps the losses of its training and its validation."""

    class Net(import_lightning().LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))
            self.losses = []
            self.validated = []
            self.automatic_optimization = not manual

        def forward(self, inputs):
            return self.net(inputs)

        def training_step(self, batch, index):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            if not manual:
                self.log("loss", loss, sync_dist=True)
                return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return None

        def validation_step(self, batch, index):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("val", loss, sync_dist=True)

        def on_validation_epoch_end(self):
            self.validated.append(float(self.trainer.callback_metrics.get("val", 0.0)))

        def configure_optimizers(self):
            return optimizer(self.parameters())

    return Net()


def make_loader(batches=BATCHES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(2 * batches * BATCH, 8, generator=generator, dtype=torch.float64).to(dtype)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin()), BATCH)


def make_trainer(strategy, **options):
    """A Trainer of two ranks."""
    given = {**QUIET, "enable_checkpointing": False, "precision": "64-true", **options}
    return import_lightning().Trainer(accelerator="cpu", devices=2, strategy=strategy, **given)


def fit(strategy, model, ckpt_path=None, **options):
    """A Trainer that has trained the model on two ranks."""
    trainer = make_trainer(strategy, **options)
    dtype = torch.float32 if "precision" in options else torch.float64
    trainer.fit(model, make_loader(dtype=dtype), make_loader(1, dtype), ckpt_path=ckpt_path)
    return trainer


def check_equal(**options):
    """The same Trainer with DDP on Gloo, and with Bagua."""
    theirs, ours = make_model(), make_model()
    fit("ddp", theirs, **options)
    fit("bagua", ours, **options)
    check_same(ours, theirs)


def check_same(ours, theirs):
    assert theirs.losses and ours.losses == theirs.losses, (ours.losses, theirs.losses)
    assert ours.validated == theirs.validated, (ours.validated, theirs.validated)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


# Scenarios


def plain():
    check_equal()


def options():
    check_equal(precision="bf16-mixed", accumulate_grad_batches=3, gradient_clip_val=0.05)


def manual_optimization():
    """Lightning's DDP leaves buffers alone here before validation; that is left out."""
    theirs, ours = make_model(manual=True), make_model(manual=True)
    fit("ddp", theirs, limit_val_batches=0)
    fit("bagua", ours, limit_val_batches=0)
    check_same(ours, theirs)


def fine_tuning():
    """A callback thaws layers in the second epoch: from then on ranks exchange them, too."""
    from lightning.pytorch.callbacks import BackboneFinetuning

    from bagua.lightning import BaguaStrategy

    def make():
        model = make_model(lambda parameters: torch.optim.SGD([one for one in parameters if one.requires_grad], 1e-2))
        model.backbone, model.head = model.net[0], model.net[3]
        return model

    def tune():
        return [BackboneFinetuning(1, backbone_initial_lr=1e-2, should_align=False, verbose=False)]

    for strategy in ("bagua", BaguaStrategy("local_sgd", interval=2, warmup_steps=2)):
        model = make()
        begun = model.backbone.weight.detach().clone()
        trainer = fit(strategy, model, max_epochs=3, callbacks=tune())
        assert trainer.global_step == 3 * BATCHES and not torch.equal(model.backbone.weight, begun)
        mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        everyone = torch.empty(2, len(mine), dtype=mine.dtype)
        bagua.allgather(mine, everyone)
        assert torch.equal(everyone[0], everyone[1])


def checkpoints():
    """A training that stops after the first of two epochs, and goes on from its checkpoint, is one without a stop. The
    checkpoint has the names of the model alone, so DDP goes on from it, too."""
    pytorch = import_lightning()
    folder = Path(os.environ["TEST_FOLDER"])
    whole, begun = make_model().double(), make_model().double()  # Lightning loads before it changes the precision
    fit("ddp", whole, max_epochs=2)
    kept = pytorch.callbacks.ModelCheckpoint(dirpath=folder, filename="first", save_on_train_epoch_end=True)
    fit("bagua", begun, enable_checkpointing=True, callbacks=[kept])
    for strategy in ("bagua", "ddp"):
        resumed = make_model().double()
        fit(strategy, resumed, ckpt_path=folder / "first.ckpt", max_epochs=2)
        assert begun.losses + resumed.losses == whole.losses, (begun.losses, resumed.losses, whole.losses)
    names = torch.load(folder / "first.ckpt", weights_only=False)["state_dict"]
    assert list(names) == list(begun.state_dict())


def algorithm_by_name():
    """Arguments reach it: weights are the same on all ranks after each second step."""
    from bagua.lightning import BaguaStrategy

    same = []

    class Compare(import_lightning().Callback):
        def on_train_batch_end(self, trainer, model, *_):
            mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            everyone = torch.empty(2 * len(mine), dtype=mine.dtype)
            bagua.allgather(mine, everyone)
            same.append(torch.equal(everyone[: len(mine)], everyone[len(mine) :]))

    for given in ({"algorithm": "local_sgd", "interval": 2}, {"algorithm": "local_sgd:interval=2"}):
        same.clear()
        fit(BaguaStrategy(**given), make_model(), callbacks=[Compare()])
        assert same == [False, True] * (BATCHES // 2), same


def wrong_arguments():
    from bagua.lightning import BaguaStrategy

    for make, words in (
        (lambda: BaguaStrategy("nothing"), "nothing"),
        (lambda: BaguaStrategy("bytegrad", interval=3), "interval"),
        (lambda: BaguaStrategy(interval=3), "need its name"),
    ):
        with pytest.raises((KeyError, TypeError), match=words):
            make()
    trainer = import_lightning().Trainer(
        accelerator="cpu", devices=3, strategy="bagua", enable_checkpointing=False, **QUIET
    )
    with pytest.raises(ConfigError, match=r"means 3 ranks, but the job has 2"):
        trainer.fit(make_model(), make_loader())


def calls_of_a_strategy():
    """Those that callbacks and loops of Lightning make."""
    model = make_model()
    trainer = fit("bagua", model)
    strategy, rank = trainer.strategy, bagua.get_rank()
    assert (strategy.world_size, strategy.global_rank, strategy.is_global_zero) == (2, rank, rank == 0)
    for op, expected in (("mean", 0.5), ("sum", 1.0), ("max", 1.0), (None, 1.0), (distributed.ReduceOp.MIN, 0.0)):
        assert strategy.reduce(torch.tensor(float(rank)), reduce_op=op).item() == expected, op
    assert strategy.reduce("text") == "text"
    assert strategy.broadcast({"rank": rank}, src=1) == {"rank": 1}
    assert strategy.reduce_boolean_decision(rank == 0) is False
    assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
    assert strategy.all_gather(torch.tensor([rank])).flatten().tolist() == [0, 1]


def parts_of_the_page():
    """Programs of docs/frameworks.md, with a Trainer that is quiet."""
    pytorch = import_lightning()
    quiet = {**QUIET, "accelerator": "cpu", "precision": "64-true", "enable_checkpointing": False}
    adam = {"optimizer": lambda parameters: QAdamOptimizer(parameters, lr=1e-2, warmup_steps=3)}

    def names():
        loader = make_loader()
        trainer = functools.partial(pytorch.Trainer, **quiet)
        given = {"bagua": bagua, "L": SimpleNamespace(Trainer=trainer), "loader": loader, "dataset": loader.dataset}
        return given | {"module": make_model(**adam), "validation_loader": make_loader(1)}

    smaller = {
        "import lightning as L": "",
        "num_workers=2": "num_workers=0",
        "256": "16",
        "max_epochs=10": "max_epochs=2",
    }
    then = {
        "trainer": "assert trainer.global_step",
        "qadam": 'L.Trainer(devices=2, strategy=BaguaStrategy("qadam")).fit(module, loader)',
    }
    assert page_parts.run_page("docs/frameworks.md", page_parts.World(names, smaller, then)) == 3


def line_that_lightning_bagua_changes():
    """The program of docs/moving/bagua.md, on processors."""
    pytorch = import_lightning()
    quiet = {**QUIET, "precision": "64-true", "enable_checkpointing": False}

    def names():
        return {"Trainer": functools.partial(pytorch.Trainer, **quiet), "module": make_model(), "loader": make_loader()}

    smaller = {"from lightning import Trainer": "", '"gpu"': '"cpu"'}
    then = {"trainer": "trainer.fit(module, loader)\nassert len(module.losses) == trainer.global_step > 0"}
    assert page_parts.run_page("docs/moving/bagua.md", page_parts.World(names, smaller, then)) == 1


def in_use(model):
    """(hooks on the model's parameters, bytes of shared memory of both ranks), when both ranks have come here."""
    model.zero_grad()  # gradients are views of shared memory
    gc.collect()
    bagua.barrier()
    found = current().connection.counters()["segment_bytes"]
    bagua.barrier()
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(one, kind) or {}) for one in model.parameters() for kind in kinds), found


def second_step_raises(step, batch, batch_idx):
    """The first one is exchanged."""
    return step(batch, 1 // (1 - batch_idx))


def failures_leave_nothing():
    """Fits that raise, and one that does not, on one Trainer and then on the next one."""
    from bagua.lightning import BaguaStrategy

    for algorithm in ("gradient_allreduce", "async:sync_interval_ms=0"):  # the latter with communicators of its own
        model = make_model()
        step, used = model.training_step, [in_use(model)]
        for _ in range(2):
            trainer = make_trainer(BaguaStrategy(algorithm))
            for failing in (True, True, True, False):
                model.losses.clear()
                model.training_step = functools.partial(second_step_raises, step) if failing else step
                with pytest.raises(ZeroDivisionError) if failing else nullcontext():
                    trainer.fit(model, make_loader())
                used.append(in_use(model))
            mine = torch.cat([one.detach().flatten() for one in model.parameters()])
            first = mine.clone()
            bagua.broadcast(first)
            assert torch.equal(mine, first), algorithm
        assert len(set(used)) == 1 and used[0][0] == 0, used


def failure_of_one_rank():
    """The fit of a rank that raises is over while the other rank trains on, also where parts of the step are under way
    or the algorithm has communicators of its own."""
    from bagua.lightning import BaguaStrategy

    rank = bagua.get_rank()
    for algorithm in ("gradient_allreduce", "async:sync_interval_ms=0"):
        model = make_model()
        model.log = lambda *_, **__: None  # that waits for the other rank
        before, step = in_use(model), model.training_step

        def raise_late(parameter):
            """In backward, when the gradients of later layers have been submitted."""
            if len(model.losses) == 3 and rank == 1:  # noqa: B023
                raise ArithmeticError

        def await_other(batch, batch_idx):
            if len(model.losses) == 2 and rank == 0:  # noqa: B023
                with current().connection.patience(PATIENCE_S):
                    bagua.barrier()  # with the other one, whose fit is over
                raise ArithmeticError
            return step(batch, batch_idx)  # noqa: B023

        model.training_step = await_other
        handle = model.net[0].weight.register_post_accumulate_grad_hook(raise_late)
        with pytest.raises(ArithmeticError), pytest.MonkeyPatch.context() as patch:
            patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "256")
            fit(BaguaStrategy(algorithm), model)
        if rank == 1:
            assert len(model.losses) == 3
            bagua.barrier()
        handle.remove()
        after = in_use(model)
        assert after == before, (before, after)
    check_equal()


def reports():
    """``self.log`` reaches ``bagua.report``."""
    from bagua.lightning import BaguaReport

    heard = []
    bagua.on_report(heard.append, all_ranks=True)
    model = make_model()
    fit("bagua", model, callbacks=[BaguaReport()])
    assert [(report.step, report.total) for report in heard] == [(step + 1, BATCHES) for step in range(BATCHES)]
    assert heard[-1].times["compute ms"] > 0 and heard[-1].metrics["loss"] > 0


def backend_bagua():
    """DDPStrategy on backend "bagua" of torch.distributed. The last scenario: that replaces the Gloo group."""
    from lightning.pytorch.strategies import DDPStrategy

    theirs, ours = make_model(), make_model()
    fit("ddp", theirs)
    distributed.destroy_process_group()
    fit(DDPStrategy(process_group_backend="bagua"), ours)
    assert distributed.get_backend() == "bagua"
    check_same(ours, theirs)


FUNCTIONS = (
    plain, options, manual_optimization, fine_tuning, checkpoints, algorithm_by_name, wrong_arguments,
    calls_of_a_strategy, parts_of_the_page, line_that_lightning_bagua_changes, failures_leave_nothing,
    failure_of_one_rank, reports, backend_bagua,
)  # fmt: skip
SCENARIOS = {scenario.__name__: scenario for scenario in FUNCTIONS}


def rank_of_an_island():
    import_lightning()
    os.environ["BAGUA_ISLAND_SIZE"] = "2"
    with pytest.raises(ConfigError, match="this job has islands"):
        fit("bagua", make_model())
    print("refused")


def test_islands_are_refused(tmp_path, run_in_ranks):
    assert all("refused" in output for output in run_in_ranks(tmp_path, PRELOAD, rank_of_an_island))


def rank_scenarios(names):
    warnings.simplefilter("default")
    bagua.init_process_group()
    for name in names:
        try:
            SCENARIOS[name]()
        except Exception:
            traceback.print_exc()  # the others may go well
            continue
        bagua.barrier()
        print(f"passed {name}", flush=True)


@pytest.fixture(scope="module")
def outputs(request, tmp_path_factory, run_in_ranks):
    """The output of every rank."""
    pytest.importorskip("lightning", reason="Lightning is not installed")
    names = [name for name in SCENARIOS if any(f"[{name}]" in item.name for item in request.session.items)]
    folder = tmp_path_factory.mktemp("ranks")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    environment["TEST_FOLDER"] = str(folder)
    return run_in_ranks(folder, PRELOAD, rank_scenarios, environment=environment, names=names)


@pytest.mark.parametrize("name", SCENARIOS)
def test_lightning(outputs, name):
    check_passed(outputs, name)
