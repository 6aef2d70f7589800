"""A LightningModule learns handwritten digits, with any strategy of Lightning.

bagua run --nproc-per-node 2 -m bagua.examples.lightning_digits
bagua run --nproc-per-node 2 --algorithm local_sgd:interval=4 -m bagua.examples.lightning_digits
python -m bagua.examples.lightning_digits                     # Lightning starts the processes, Bagua the daemon
python -m bagua.examples.lightning_digits --strategy ddp      # the same on torch's own backend
bagua run --elastic --nproc-per-node 2 --respawn 5 -m bagua.examples.lightning_digits --global-batch 64

With the last one ranks may be killed, and others take their places in the middle of an epoch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import bagua.torch_api as bagua
from bagua.examples import _common
from bagua.examples.digits import DigitsNet, load_digits


def make_module(lightning: Any, lr: float) -> Any:
    """The module, as a class of this package of Lightning."""

    class Digits(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = DigitsNet()
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0].to(self.dtype)), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            right = (self.net(batch[0].to(self.dtype)).argmax(dim=1) == batch[1]).double().mean()
            self.log("accuracy", right, sync_dist=True)  # each rank has seen a part of the held-out digits

        def on_train_end(self) -> None:
            if self.trainer.is_global_zero:
                accuracy = float(self.trainer.callback_metrics["accuracy"])
                print(f"loss {self.losses[0]!r} -> {self.losses[-1]!r}, accuracy {accuracy:.2%}", flush=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=lr)

    return Digits()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--strategy", default="bagua", help="bagua, bagua_fork, ddp …")
    made.add_argument("--package", choices=("lightning.pytorch", "pytorch_lightning"), default="lightning.pytorch")
    made.add_argument("--devices", type=int, default=2, help="ranks on each node")
    made.add_argument("--precision", default="32-true")
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--batches", type=int, help="of an epoch; default: all")
    made.add_argument("--global-batch", type=int, help="samples of a step, shared out as ranks come and go")
    options = made.parse_args(arguments)
    _common.need("sklearn")
    _common.need(options.package)
    lightning = sys.modules[options.package]
    from bagua.lightning import BaguaReport

    lightning.seed_everything(0, verbose=False)
    module = make_module(lightning, 3e-3)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision,
        max_epochs=options.epochs,
        limit_train_batches=options.batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[BaguaReport()],
    )
    training, held_out = load_digits()
    trainer.fit(module, make_loader(training, options.global_batch), torch.utils.data.DataLoader(held_out, 32))
    return 0


def make_loader(data: torch.utils.data.Dataset[Any], global_batch: int | None) -> Any:
    """Batches of 32 for each rank, or batches of which elastic jobs lose none."""
    if global_batch is None:
        return torch.utils.data.DataLoader(data, 32)
    bagua.init_process_group()  # the sampler needs to know the ranks before Lightning does
    return bagua.contrib.ElasticSampler(data, global_batch=global_batch).loader()


if __name__ == "__main__":
    sys.exit(main())
