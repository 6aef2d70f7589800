"""A small GPT-2 learns the pages of Python's documentation, with Hugging Face's Trainer or with Accelerate alone.

    bagua run --nproc-per-node 2 -m bagua.accelerate -m bagua.examples.hugging_face
    accelerate launch --multi_gpu --num_processes 2 -m bagua.accelerate -m bagua.examples.hugging_face
    torchrun --nproc-per-node 2 -m bagua.examples.hugging_face          # the same on torch's own backend

The program knows nothing of Bagua: ``bagua.accelerate`` brings up the process group before it starts. The model is made
from a configuration, tokens are bytes, and the text comes with every Python: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

CONTEXT = 64


class Pages(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text behind ``help()``: int64 [CONTEXT] bytes, as inputs and as labels."""

    def __init__(self, pieces: int) -> None:
        from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

        text = "\n".join(topics[name] for name in sorted(topics)).encode()[: pieces * CONTEXT]
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._bytes[index], "labels": self._bytes[index]}


def make_model(seed: int, dtype: torch.dtype) -> Any:
    """A GPT-2 of 2 layers over 256 bytes, without dropout: losses can be compared."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 48, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).to(dtype)


def train_with_trainer(options: argparse.Namespace, model: Any, folder: str) -> list[float]:
    """The losses that the Trainer logs: means over ranks."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,  # it warns where there is no GPU
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Pages(options.pieces))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_accelerate(options: argparse.Namespace, model: Any) -> list[float]:
    """The mean loss over ranks of each step."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(Pages(options.pieces), options.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    micro: list[torch.Tensor] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        micro.append(loss.detach())
        if accelerator.sync_gradients:
            losses.append(accelerator.gather(torch.stack(micro)).mean().item())
            micro.clear()
        if len(losses) == options.steps:
            break
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--loop", choices=("trainer", "accelerate"), default="trainer")
    for name, value in {"steps": 20, "batch_size": 4, "accumulate": 2, "pieces": 512, "seed": 0, "lr": 3e-3}.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    made.add_argument("--float64", action="store_true", help="weights and gradients in double precision")
    options = made.parse_args(arguments)
    model = make_model(options.seed, torch.float64 if options.float64 else torch.float32)
    if options.loop == "accelerate":
        losses = train_with_accelerate(options, model)
    else:
        with tempfile.TemporaryDirectory() as folder:
            losses = train_with_trainer(options, model, folder)
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    print(f"backend {backend}: loss {losses[0]!r} -> {losses[-1]!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
