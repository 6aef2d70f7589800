"""Hugging Face: Trainer and Accelerate give the same losses, bit by bit, on Gloo and after ``import bagua.accelerate``.

The program is bagua.examples.hugging_face, which knows nothing of Bagua.
"""

import argparse
import os
import warnings

import pytest
import torch
from rig.ranks.scenarios import check_passed
from torch import distributed

from bagua.base.errors import ConfigError
from bagua.examples import hugging_face
from bagua.torch_api.job.environment import find_free_network_port

PRELOAD = ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
OPTIONS = argparse.Namespace(steps=4, batch_size=2, accumulate=2, pieces=64, seed=0, lr=3e-3)
LOOPS = ("trainer", "accelerate")
SCENARIOS = (*LOOPS, "reports", "another backend")


def losses_of(loop, folder):
    """Of one training, whatever process group is up."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = hugging_face.make_model(0, torch.float64)
    if loop == "trainer":
        return hugging_face.train_with_trainer(OPTIONS, model, folder)
    return hugging_face.train_with_accelerate(OPTIONS, model)


def compare(loop, folder):
    import bagua.accelerate

    theirs = losses_of(loop, folder)
    assert distributed.get_backend() == "gloo"
    distributed.destroy_process_group()
    assert bagua.accelerate.begin() and bagua.accelerate.begin()
    ours = losses_of(loop, folder)
    assert distributed.get_backend() == "bagua"
    distributed.destroy_process_group()
    assert len(ours) == OPTIONS.steps and ours == theirs, (ours, theirs)


def hear_reports(folder):
    """Values that the Trainer logs reach ``bagua.report``."""
    from transformers import Trainer, TrainingArguments

    import bagua.torch_api as bagua
    from bagua.accelerate import BaguaReport

    heard = []
    bagua.on_report(heard.append, all_ranks=True)
    arguments = TrainingArguments(folder, max_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    model = hugging_face.make_model(0, torch.float32)
    Trainer(model, arguments, train_dataset=hugging_face.Pages(32), callbacks=[BaguaReport()]).train()
    if int(os.environ["RANK"]) == 0:  # a Trainer logs there alone
        assert [(one.step, one.total) for one in heard][:2] == [(1, 2), (2, 2)]
        assert heard[0].metrics["loss"] > 0


def rank_of_an_island():
    """A loader of Accelerate would deal its samples inside of the island; backend "bagua" is all ranks."""
    warnings.simplefilter("default")
    os.environ |= {"ACCELERATE_USE_CPU": "true", "BAGUA_ISLAND_SIZE": "2"}
    import bagua.torch_api as bagua

    with pytest.raises(ConfigError, match="know no islands"):
        import bagua.accelerate
    bagua.init_process_group()
    model = torch.nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    from accelerate import PartialState

    PartialState(cpu=True)
    with pytest.raises(ConfigError, match="would give islands the same samples"):
        model.with_bagua([torch.optim.SGD(model.parameters(), 0.1)])
    print("refused")


def test_islands_are_refused(tmp_path, run_in_ranks):
    assert all("refused" in output for output in run_in_ranks(tmp_path, PRELOAD, rank_of_an_island))


def rank_scenarios(names, folder):
    warnings.simplefilter("default")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    import bagua.accelerate  # first of all, as a program does it

    for name in names:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        where = f"file://{folder}/{name.replace(' ', '-')}"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
        if name in LOOPS:
            compare(name, folder)
        elif name == "reports":
            hear_reports(folder)
        else:
            with pytest.raises(ConfigError, match=r"with backend .*gloo"):
                bagua.accelerate.begin()
        print(f"passed {name}", flush=True)


@pytest.fixture(scope="module")
def outputs(request, tmp_path_factory, run_in_ranks):
    """The output of every rank."""
    pytest.importorskip("transformers", reason="Transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    names = [name for name in SCENARIOS if any(f"[{name}]" in item.name for item in request.session.items)]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    folder = tmp_path_factory.mktemp("ranks")
    arguments = {"environment": environment, "names": names, "folder": str(folder)}
    found = run_in_ranks(folder, PRELOAD, rank_scenarios, **arguments)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_hugging_face(outputs, name):
    check_passed(outputs, name)


def test_one_process_needs_no_group(monkeypatch):
    """A script that was not started as one of several ranks trains alone, as without Bagua."""
    monkeypatch.delenv("RANK", raising=False)
    from bagua import accelerate

    assert accelerate.begin() is False
    assert not distributed.is_initialized()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys, helper\nprint(__name__, sys.argv[1:], helper.WORD)\n")
    (tmp_path / "helper.py").write_text("WORD = 'beside it'\n")
    return path


def test_a_script_runs_as_python_would_run_it(script, monkeypatch, capsys):
    from bagua.accelerate import __main__ as program

    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setattr("sys.argv", ["program", str(script), "--steps", "3"])
    program.main()
    assert capsys.readouterr().out == "__main__ ['--steps', '3'] beside it\n"
    monkeypatch.setattr("sys.argv", ["program"])
    with pytest.raises(SystemExit, match="usage"):
        program.main()
