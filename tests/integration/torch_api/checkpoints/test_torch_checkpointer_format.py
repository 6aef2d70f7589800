"""The form of checkpoints is that of torch.distributed.checkpoint: plain torch reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rig.checkpoints import folder_of
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError


def rank_forgets(folder: str) -> list[str]:
    bagua.init_process_group()
    torch.manual_seed(2)
    model = nn.Linear(300, 2000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    told = []
    checkpointer = bagua.checkpoint.Checkpointer(every=1)  # the folder is that of --checkpoint-dir
    try:
        bagua.checkpoint.Checkpointer(folder)
    except BaguaError as error:
        told.append(str(error))
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    try:
        checkpointer.step()
    except BaguaError as error:
        told.append(str(error))
    torch.save(model.state_dict(), Path(folder) / f"model-{bagua.get_rank()}")
    torch.save(optimizer.state_dict(), Path(folder) / "optimizer")
    bagua.communication.destroy_process_group()
    return told


def test_plain_torch_reads_it(make_ranks: Any, tmp_path: Path) -> None:
    """Also: a folder from the environment; a run that does not resume is refused; each tensor is there once."""
    folder = tmp_path / "c"
    for number in range(2):
        here = tmp_path / str(number)
        here.mkdir()
        with make_ranks(here) as made:
            environment = {"BAGUA_CHECKPOINT_DIR": str(folder)}
            found = made.run(rank_forgets, 3, folder=str(here), environment=environment)
        assert ["There is a Checkpointer already" in told[0] for told in found] == [True] * 3
        assert [len(told) for told in found] == [1 + number] * 3
    assert "has checkpoints of an earlier run. Call resume()" in found[0][1]

    at = folder / folder_of(1)
    whole = torch.load(tmp_path / "0" / "model-0")
    sizes = [(at / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert sum(sizes) < 3.1 * whole["weight"].nbytes, "weights, and two moments"
    assert max(sizes) < 1.2 * min(sizes)
    empty = {"model": {name: torch.zeros_like(one) for name, one in whole.items()}}
    from torch.distributed import checkpoint  # takes two seconds of a core to import
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with pytest.warns(UserWarning, match="in a single process"):
        checkpoint.load(empty, storage_reader=checkpoint.FileSystemReader(at))
    assert all(torch.equal(empty["model"][name], one) for name, one in whole.items())

    dcp_to_torch_save(at, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(saved["model"][name], one) for name, one in whole.items())
    moments = torch.load(tmp_path / "0" / "optimizer")["state"]
    for number, name in enumerate(whole):
        assert all(torch.equal(saved["optimizer"]["state"][name][key], one) for key, one in moments[number].items())
    assert saved["bagua"]["job"]["model 1"]["model"]["steps"] == 1
