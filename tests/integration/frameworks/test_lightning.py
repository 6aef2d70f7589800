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
from bagua.base.islands import VARIABLE
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


# Islands


def make_layers():
    torch.manual_seed(3)
    linear = functools.partial(nn.Linear, dtype=torch.float64)  # Lightning's default inside configure_model
    return nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 4))


def make_adam(parameters):
    """AdamW that numbers parameters in another order than the model, and has one without a gradient."""
    return torch.optim.AdamW([*reversed(list(parameters)), nn.Parameter(torch.zeros(2, dtype=torch.float64))], 1e-2)


def make_sharded(tensor_parallel=False, optimizer=make_adam):
    """A model that its island divides, when the mesh is there."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    model = make_model(optimizer)
    model.net = None

    def configure_model():
        if model.net is None:
            model.net = make_layers()
            if model.device_mesh is None:  # as in load_from_checkpoint
                return
            if tensor_parallel:
                ways = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
                parallel.parallelize_module(model.net, model.device_mesh["tensor_parallel"], ways)
            if (mesh := model.device_mesh["data_parallel"]).size() > 1:
                fully_shard(model.net[0], mesh=mesh)
                fully_shard(model.net, mesh=mesh)

    model.configure_model = configure_model
    return model


def epoch_in_one_process(net, optimizer, epoch, clip, batches=4):
    """Trains an epoch in which each step has ``batches``, in the order of DistributedSampler."""
    data = make_loader().dataset
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    for part in order.split(batches * BATCH):
        optimizer.zero_grad()
        inputs, targets = data[part]
        nn.functional.mse_loss(net(inputs), targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def rank_of_an_island(folder, clip):
    pytorch = import_lightning()
    kept = Path(folder, "first.ckpt")
    train = functools.partial(
        pytorch.Trainer, accelerator="cpu", devices=4, precision="64-true", gradient_clip_val=clip,
        enable_checkpointing=False, **{**QUIET, "max_epochs": None},
    )  # fmt: skip
    data = make_loader(), make_loader(1)
    net = make_layers()
    optimizer = make_adam(net.parameters())

    def check(found):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(found[f"net.{name}"], value, rtol=1e-9, atol=1e-12)

    begun, resumed = make_sharded(), make_sharded()
    trainer = train(strategy="bagua", max_epochs=1)
    trainer.fit(begun, *data)
    assert bagua.get_replica_count() == 2 and distributed.get_world_size() == 2
    epoch_in_one_process(net, optimizer, 0, clip)
    assert begun.net[0].weight.to_local().numel() == net[0].weight.numel() // 2
    check({name: one.full_tensor() for name, one in begun.state_dict().items()})
    trainer.save_checkpoint(kept)
    trainer.validate(begun, data[1], verbose=False)
    with torch.no_grad():
        whole = nn.functional.mse_loss(net(data[1].dataset.tensors[0]), data[1].dataset.tensors[1])
    assert begun.validated[-2:] == pytest.approx([whole.item()] * 2, rel=1e-6)  # Lightning's metrics are float32

    told = torch.load(kept, weights_only=False)
    check(told["state_dict"])
    missing = {**told, "state_dict": {name: told["state_dict"][name] for name in list(told["state_dict"])[1:]}}
    if bagua.get_rank() == 0:
        torch.save(missing, Path(folder, "missing.ckpt"))
    bagua.barrier()
    with pytest.raises(ConfigError, match="sync_batchnorm"):
        train(strategy="bagua", max_epochs=1, sync_batchnorm=True).fit(make_sharded(), *data)
    with pytest.raises(ConfigError, match="full_tensor"):
        trainer.strategy.save_checkpoint({"average": begun.net[0].weight}, kept)
    assert (bagua.get_rank() == 0) == hasattr(trainer.strategy.lightning_module_state_dict(), "_metadata")
    with pytest.raises(RuntimeError, match="Missing key"):
        train(strategy="bagua").validate(make_sharded(), data[1], ckpt_path=Path(folder, "missing.ckpt"))
    train(strategy="bagua", max_epochs=2).fit(resumed, *data, ckpt_path=kept)
    optimizer = make_adam(net.parameters())
    optimizer.load_state_dict(told["optimizer_states"][0])  # an undivided model goes on from it
    epoch_in_one_process(net, optimizer, 1, clip)
    check({name: one.full_tensor() for name, one in resumed.state_dict().items()})

    sgd = functools.partial(make_sharded, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    trainer = train(strategy="bagua", max_epochs=1)
    trainer.fit(sgd(), *data)
    trainer.save_checkpoint(kept)
    train(strategy="bagua", max_epochs=2).fit(sgd(), *data, ckpt_path=kept)  # its state is empty

    print("passed islands", flush=True)


def rank_of_tensor_parallelism(folder):
    """Pairs of ranks compute with the same batches."""
    from bagua.lightning import BaguaStrategy

    net, kept = make_layers(), Path(folder, "first.ckpt")
    optimizer = make_adam(net.parameters())
    for epoch in (0, 1):
        model = make_sharded(tensor_parallel=True)
        options = {**QUIET, "max_epochs": epoch + 1, "precision": "64-true", "enable_checkpointing": False}
        trainer = import_lightning().Trainer(
            accelerator="cpu",
            devices=4,
            strategy=BaguaStrategy(tensor_parallel_size=2),
            gradient_clip_val=1.0,
            **options,
        )
        trainer.fit(model, make_loader(), ckpt_path=kept if epoch else None)
        trainer.save_checkpoint(kept)
        epoch_in_one_process(net, optimizer, epoch, 1.0, batches=2)
        for name, value in net.state_dict().items():
            found = model.state_dict()[f"net.{name}"].full_tensor()
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
    print("passed pairs", flush=True)


@pytest.mark.parametrize("size", [pytest.param("2", marks=pytest.mark.full), "4"])
def test_tensor_parallelism_on_islands(run_islands, size):
    """Tensor parallelism alone, and below FSDP."""
    run_islands(rank_of_tensor_parallelism, size, "pairs")


def rank_of_an_island_with_metrics(folder):
    """Lightning's callbacks go by results over all ranks: a rate that falls, and the best checkpoint."""
    from torchmetrics import MeanSquaredError

    from bagua.lightning import sharded

    pytorch = import_lightning()
    model = make_sharded(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    model.metric, rank, gathered = MeanSquaredError(), bagua.get_rank(), []

    def validation_step(batch, batch_idx):
        model.metric(model(batch[0]) * (1 + rank), batch[1])
        model.log("error", model.metric, on_epoch=True)
        gathered.append(model.all_gather(torch.tensor([rank])).flatten().tolist())

    model.validation_step = validation_step
    kept = pytorch.callbacks.ModelCheckpoint(folder, filename="{error:.6f}", monitor="error", save_top_k=1)
    trainer = pytorch.Trainer(
        accelerator="cpu", devices=4, precision="64-true", strategy="bagua", callbacks=[kept],
        **{**QUIET, "max_epochs": 3},
    )  # fmt: skip
    trainer.fit(model, make_loader(), make_loader(1))
    assert gathered and all(one == [0, 1, 2, 3] for one in gathered), gathered
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int64):
        for shape in ((), (0, 3), (rank, 2), (2, 3)):
            found = sharded.gather_over_all(torch.full(shape, rank, dtype=dtype))
            wanted = [shape if shape != (rank, 2) else (other, 2) for other in range(4)]
            assert all(
                torch.equal(one, torch.full(size, other, dtype=dtype))
                for other, (one, size) in enumerate(zip(found, wanted, strict=True))
            ), (dtype, shape, found)
    told = bagua.communication.broadcast_object((kept.best_model_path, kept.best_model_score.item()))
    assert told == (kept.best_model_path, kept.best_model_score.item())
    inputs, targets = make_loader(1).dataset.tensors
    [tested] = trainer.validate(model, make_loader(1), ckpt_path="best", verbose=False)
    with torch.no_grad():
        scale = torch.arange(len(inputs), dtype=inputs.dtype).remainder(4).add(1).unsqueeze(1)  # dealt out in turn
        net = make_layers()
        net.load_state_dict({name[4:]: one for name, one in torch.load(told[0])["state_dict"].items()})
        assert tested["error"] == pytest.approx(nn.functional.mse_loss(net(inputs) * scale, targets).item(), rel=1e-5)
    print("passed metrics", flush=True)


def test_metrics_over_islands(run_islands):
    run_islands(rank_of_an_island_with_metrics, "2", "metrics")


@pytest.fixture
def run_islands(tmp_path, run_in_ranks):
    """``run_islands(function, size, passed)``: on four ranks, in islands of ``size``."""

    def run(function, size, passed, **arguments):
        environment = {VARIABLE: size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
        given = {"nprocs": 4, "environment": environment, "folder": str(tmp_path), **arguments}
        check_passed(run_in_ranks(tmp_path, PRELOAD, function, **given), passed)

    return run


def test_islands(run_islands):
    """An island's parts together train as one process, save whole tensors, and go on from them."""
    run_islands(rank_of_an_island, "2", "islands", clip=0.05)


def rank_of_a_wrong_mesh():
    from bagua.lightning import BaguaStrategy

    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide an island of 2"):
        make_trainer(BaguaStrategy(tensor_parallel_size=3)).fit(make_sharded(), make_loader())
    print("passed mesh", flush=True)


def test_a_mesh_that_does_not_fill_the_island_is_refused(tmp_path, run_in_ranks):
    outputs = run_in_ranks(tmp_path, PRELOAD, rank_of_a_wrong_mesh, environment={VARIABLE: "2"})
    check_passed(outputs, "mesh")


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
