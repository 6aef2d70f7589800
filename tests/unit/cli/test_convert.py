"""``bagua convert``: what it changes in which text, what it leaves, and what it says. ``test_torch_converted.py`` runs
scripts before and after."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bagua.base.errors import UsageError
from bagua.cli.app import app
from bagua.convert import convert

DDP = "bagua.data_parallel.DistributedDataParallel"
OURS = "from bagua.torch_api.data_parallel import DistributedDataParallel"
IMPORT = "import bagua.torch_api as bagua\n"
BEGIN = "bagua.init_process_group()"
BOTH = "cpu:bagua,cuda:nccl"


def one(text, *others):
    given = {"train.py": text.encode() if isinstance(text, str) else text}
    return convert(given | {f"other{n}.py": other.encode() for n, other in enumerate(others)})[0]


def after(text, *others):
    return one(text, *others).after.decode()


WRAP = "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(model)\n"
WRAPPED = f"import torch\nmodel = {DDP}(model)\n"


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ('torch.distributed.init_process_group("gloo")', BEGIN),
        ('torch.distributed.init_process_group(backend="nccl", init_method="env://")', BEGIN),
        ("torch.distributed.init_process_group('gloo', 'env://', rank=-1, world_size=-1, store=None)", BEGIN),
        ("torch.distributed.init_process_group(\n    # which\n    backend='gloo',\n)  # here", f"{BEGIN}  # here"),
        ("a = 1; torch.distributed.init_process_group('gloo'); b = 2", f"a = 1; {BEGIN}; b = 2"),
        ("if a: torch.distributed.init_process_group('gloo'); b = 2", f"if a: {BEGIN}; b = 2"),
        (
            "if a: torch.distributed.init_process_group('gloo', rank=r, world_size=w)  # here",
            f'if a: torch.distributed.init_process_group("bagua", rank=r, world_size=w); {BEGIN}  # here',
        ),
        (
            "def f():\n\ttorch.distributed.init_process_group('nccl', a)  # here\n\treturn 1",
            f'def f():\n\ttorch.distributed.init_process_group("{BOTH}", a)  # here\n\t{BEGIN}\n\treturn 1',
        ),
        (
            "torch.distributed.init_process_group(store=s, rank=r, world_size=w)",
            f'torch.distributed.init_process_group(backend="bagua", store=s, rank=r, world_size=w)\n{BEGIN}',
        ),
        (
            "torch.distributed.init_process_group(torch.distributed.Backend.GLOO, rank=0, world_size=1)",
            f'torch.distributed.init_process_group("bagua", rank=0, world_size=1)\n{BEGIN}',
        ),
        (
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)',
            f'torch.distributed.init_process_group("cpu:bagua,cuda:nccl", rank=0, world_size=1)\n{BEGIN}',
        ),
        (
            'torch.distributed.init_process_group("nccl" if gpu else "gloo", rank=0, world_size=1)',
            f'torch.distributed.init_process_group("{BOTH}" if gpu else "bagua", rank=0, world_size=1)\n{BEGIN}',
        ),
    ],
)
def test_calls_of_init_process_group(call, wanted):
    assert after(f"{WRAP}{call}\n") == f"{IMPORT}{WRAPPED}{wanted}\n"


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("import torch.distributed as dist", "dist.init_process_group"),
        ("from torch import distributed", "distributed.init_process_group"),
        ("from torch import distributed as d", "d.init_process_group"),
        ("import torch; dist = torch.distributed", "dist.init_process_group"),
        ("from torch.distributed import init_process_group as begin, barrier", "begin"),
        ("from torch.distributed import *", "init_process_group"),
        ("import torch.distributed.distributed_c10d as c", "c.init_process_group"),
        ("try:\n    import torch.distributed as dist\nexcept ImportError:\n    dist = None", "dist.init_process_group"),
        ("import torch\nbegin = torch.distributed.init_process_group", "begin"),
    ],
)
def test_names_of_init_process_group(imports, name):
    assert after(f"{imports}\n{name}('gloo')\n", WRAP) == f"{IMPORT}{imports}\n{BEGIN}\n"
    inside = f"def f():\n    {imports.splitlines()[0]}\n    {name}('gloo')\n"
    if "\n" not in imports and "*" not in imports:
        assert BEGIN in after(inside, WRAP)


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("from torch.nn.parallel import DistributedDataParallel", OURS),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", f"{OURS} as DDP"),
        ("from torch.nn.parallel.distributed import DistributedDataParallel as DDP", f"{OURS} as DDP"),
        (
            "from torch.nn.parallel import (\n    DataParallel, DistributedDataParallel as DDP,  # both\n)",
            f"from torch.nn.parallel import DataParallel\n{OURS} as DDP",
        ),
        (
            "import os; from torch.nn.parallel import DataParallel as DP, DistributedDataParallel; x = 1",
            f"import os; from torch.nn.parallel import DataParallel as DP; {OURS}; x = 1",
        ),
        ("import torch.nn as nn; m = nn.parallel.DistributedDataParallel(m)", f"import torch.nn as nn; m = {DDP}(m)"),
        ("from torch import nn; D = nn.parallel.DistributedDataParallel", f"from torch import nn; D = {DDP}"),
        (
            "from torch.nn import parallel as p; p.DistributedDataParallel(m)",
            f"from torch.nn import parallel as p; {DDP}(m)",
        ),
        ("from torch.nn.parallel import *; DistributedDataParallel(m)", f"from torch.nn.parallel import *; {DDP}(m)"),
        ("import torch\ndef f(m: torch.nn.parallel.DistributedDataParallel): 0", f"import torch\ndef f(m: {DDP}): 0"),
    ],
)
def test_names_of_the_class(before, wanted):
    assert after(f"{before}\n") == f"{IMPORT}{wanted}\n"


def test_names_that_mean_something_else_are_left():
    text = "import dist, nn\nclass C:\n    def f(dist): dist.init_process_group('gloo')\n"
    text += "nn.parallel.DistributedDataParallel(m)\n"
    done = one(text)
    assert done.changes == 0 and done.after == done.before
    assert [note.line for note in done.notes if note.line] == [3, 4]
    shadowed = "import torch.distributed as dist\ndef f(dist):\n    dist.init_process_group('gloo')\n"
    assert after(shadowed, WRAP) == shadowed
    passed_on = one("import torch.distributed as dist\nrun(dist.init_process_group)\n", WRAP)
    assert passed_on.changes == 0 and passed_on.notes[-1].line == 2
    asked = one("import torch.distributed as dist\ngetattr(dist, 'init_process_group')('gloo')\n", WRAP)
    assert asked.changes == 0 and asked.notes[-1].line == 2


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        ('"""Words."""\nfrom __future__ import annotations\nimport os\n', "import os\n" + IMPORT),
        ('"""Words."""; ', '"""Words."""; import bagua.torch_api as bagua; '),
        ("from __future__ import annotations; ", "annotations; import bagua.torch_api as bagua; "),
        ("#!/usr/bin/python\n# -*- coding: utf-8 -*-\n", "utf-8 -*-\n" + IMPORT),
        ("import os\ntry:\n    import torch.cuda\nfinally: 0\n", "import os\n" + IMPORT),
    ],
)
def test_the_library_is_imported_where_it_may_be(head, wanted):
    found = after(head + WRAP)
    assert wanted in found and found.count("import bagua") == 1
    compile(found, "train.py", "exec")


def test_a_name_that_is_taken_and_an_import_that_is_there():
    assert "import bagua.torch_api as bagua_api\n" in after(f"bagua = 1\n{WRAP}")
    theirs = after(f"import bagua.torch_api as b\n{WRAP}b.init_process_group()\n")
    assert theirs.count("import bagua") == 1 and "b.data_parallel.Dist" in theirs
    inside = after("@decorated\ndef f():\n    import torch\n    torch.nn.parallel.DistributedDataParallel(m)\n")
    assert inside.startswith(IMPORT + "@decorated")


def test_bytes_that_are_not_changed_stay():
    text = "# ä\r\nå = 'ö'; import torch; torch.nn.parallel.DistributedDataParallel(å)\r\n# no end"
    wanted = f"# ä\r\nå = 'ö'; import torch; {DDP}(å)\r\n# no end".replace("å = 'ö'", f"{IMPORT.strip()}\r\nå = 'ö'")
    assert one(b"\xef\xbb\xbf" + text.encode()).after == b"\xef\xbb\xbf" + wanted.encode()
    latin = f"# coding: latin-1\n# ä\n{WRAP}".encode("latin-1")
    assert one(latin).after.startswith(b"# coding: latin-1\n# \xe4\n")
    with pytest.raises(UsageError, match=r"line 1.*BG102"):
        one("%matplotlib inline\n")
    with pytest.raises(UsageError, match=r"notebook_launcher.*BG102"):
        convert({"train.ipynb": b'{"cells": []}'})


def test_files_that_were_converted_alone_are_converted_together():
    helper = "import torch.distributed as dist\ndist.init_process_group('gloo', rank=r, world_size=2)\n"
    alone = [one(WRAP).after.decode(), one(helper).after.decode()]
    assert BEGIN not in "".join(alone)
    together = after(alone[1], alone[0])
    assert together == after(helper, WRAP)
    assert after(together, alone[0]) == together


@pytest.mark.parametrize(
    "obstacle",
    [
        "model.register_comm_hook(None, hook)",
        "torch.nn.parallel.DistributedDataParallel(m, mixed_precision=p)",
        "from torch.distributed.fsdp import fully_shard",
        "torch.distributed.device_mesh.init_device_mesh('cpu', (2,))",
    ],
)
def test_ddp_that_needs_torchs_own_gets_the_backend(obstacle):
    text = f"{WRAP}torch.distributed.init_process_group('gloo')\n{obstacle}\n"
    done = one(text)
    assert done.after.decode() == text.replace("'gloo'", '"bagua"')
    assert any(note.line == 4 and "stays torch's" in note.text for note in done.notes)


def test_the_command_writes_when_it_is_told_to(tmp_path):
    script, helper = tmp_path / "train.py", tmp_path / "helper.py"
    script.write_text(WRAP)
    helper.write_text("import torch.distributed as dist\ndef begin():\n    dist.init_process_group('gloo')\n")
    script.chmod(0o755)
    run = CliRunner()
    shown = run.invoke(app, ["convert", str(script), str(helper)])
    assert shown.exit_code == 0 and script.read_text() == WRAP
    assert f"-model = torch.nn.parallel.DistributedDataParallel(model)\n+model = {DDP}(model)" in shown.output
    again = subprocess.run(
        [sys.executable, "-P", "-m", "bagua.cli.main", "convert", "--write", script, helper], capture_output=True
    )
    assert again.returncode == 0 and script.read_text() == IMPORT + WRAPPED
    assert BEGIN in helper.read_text() and script.stat().st_mode & 0o777 == 0o755
    missing = run.invoke(app, ["convert", str(tmp_path / "none.py")])
    assert missing.exit_code and "BG104" in str(missing.exception)
