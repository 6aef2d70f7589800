"""Checkpoints that are damaged, of another program, or half written; folders that can't be used."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.checkpoints import WIDTH, Net, await_true, folder_of
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.saving import folder as on_disk


def rank_tells(
    folder: str, width: int = WIDTH, states: bool = False, limit: int = 0, adam: bool = False
) -> tuple[str, list[str], int]:
    """(the error of resuming or the step, names in the folder, checkpoints that failed)."""
    bagua.init_process_group()
    torch.manual_seed(3)
    model = Net(width)
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    if states:
        bagua.register_state("more", torch.optim.lr_scheduler.StepLR(optimizer, 2))
    try:
        checkpointer = bagua.checkpoint.Checkpointer(folder, every=1, keep=3)
        if limit:
            import resource

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
    bagua.communication.destroy_process_group()
    names = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    return text, names, checkpointer.failed if checkpointer else 0


def test_bad_checkpoints_and_folders(make_ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def run(number: int, **arguments: Any) -> tuple[str, list[str], int, str]:
        here = tmp_path / str(number)
        here.mkdir()
        with make_ranks(here) as made:
            told = made.run(rank_tells, 1, **{"folder": str(folder), **arguments})[0]
            return *told, made.started[0].output if made.started else (here / "rank-0.log").read_text()

    text, names, failed, _ = run(0)
    assert (text, names, failed) == ("none", [folder_of(1), folder_of(2), folder_of(3)], 0)

    data = next((folder / folder_of(3)).glob("__0_*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    metadata = folder / folder_of(2) / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-7])
    text, names, failed, told = run(1)
    assert (text, failed) == ("1", 0)
    assert names == [f"damaged-{folder_of(2)}", f"damaged-{folder_of(3)}", folder_of(2), folder_of(3), folder_of(4)]
    assert f"{folder_of(3)} is damaged: the contents of {data.name} have changed" in told
    assert f"{folder_of(2)} is damaged: .metadata has" in told and "The one before is taken" in told

    assert "is a checkpoint of another program. Its model 1 differs." in run(2, width=4)[0]
    assert "this program has model 1, state more" in run(3, states=True)[0]
    text = run(7, adam=True)[0]
    assert "Its model 1 differs. Of its optimizers the checkpoint has [['SGD'," in text
    assert "this program has [['Adam'," in text and "Make the optimizers that it was written with." in text

    for number in (2, 3, 4):
        (folder / folder_of(number) / "bagua.json").unlink()
    text = run(4)[0]
    assert "No checkpoint in" in text and f"{folder_of(4)}: it has no bagua.json" in text and "another folder" in text

    (tmp_path / "file").touch()
    assert "Checkpoints can't be written into" in run(5, folder=str(tmp_path / "file" / "c"))[0]

    text, names, failed, told = run(6, folder=str(tmp_path / "full"), limit=3000)
    assert (text, names, failed) == ("none", [folder_of(3)], 2), "training goes on, and the next one is written"
    assert "There is no checkpoint of step 1" in told and "Training goes on" in told


def rank_writes(folder: str, every: int, elements: int, again: bool = False, steps: int = 10**6) -> tuple[int, float]:
    """A model whose weights are all the number of the step, and whose optimizer's state is large."""
    bagua.init_process_group()
    model = nn.Linear(elements // 16, 16, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=every, keep=2)
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
def test_killed_in_the_middle_of_writing(make_ranks: Any, tmp_path: Path, victims: tuple[int, ...]) -> None:
    folder, here = tmp_path / "c", tmp_path / "first"
    here.mkdir()
    with make_ranks(here) as made:
        made.start(rank_writes, 2, folder=str(folder), every=1, elements=1 << 18)

        def half_written() -> bool:
            writing = [path for path in folder.glob("writing-*") if not (path / "bagua.json").exists()]
            return len(on_disk.checkpoints(folder)) > 1 and any(any(one.glob("__*")) for one in writing)

        await_true(half_written)
        for victim in victims:
            os.kill(made.started[victim].process.pid, signal.SIGKILL)
        for rank in made.started:
            rank.process.wait(60.0)
    newest = on_disk.checkpoints(folder)[0]
    manifest = on_disk.read_manifest(newest)
    on_disk.verify(newest, manifest, manifest.files)
    here = tmp_path / "second"
    here.mkdir()
    with make_ranks(here) as made:
        end = manifest.step + 2
        found = made.run(rank_writes, 2, folder=str(folder), every=1, elements=1 << 18, again=True, steps=end)
    assert found == [(end, -float(end))] * 2
    assert sorted(path.name for path in folder.iterdir()) == [folder_of(end - 1), folder_of(end)], (
        "nothing is left over"
    )
