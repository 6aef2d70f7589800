"""``import torch`` and other files of our name: ``_bagua_autoload`` names what is in the way, and never runs it."""

import subprocess
import sys

import pytest

import _bagua_autoload
from _bagua_autoload import NAME

BAD = "raise SystemExit('this ran')"
OTHERS = {
    "bagua.py": BAD,
    "bagua/__init__.py": BAD,
    "bagua/c10d/__init__.py": "",  # and bagua has no __init__.py: our package is found behind it
    "bagua_core/__init__.py": BAD,
    "bagua_core.py": "if a syntax error",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_python_takes_for_our_package_is_found(name, tmp_path, monkeypatch):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OTHERS[name])
    monkeypatch.delitem(sys.modules, "bagua", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert _bagua_autoload.in_the_way() == (str(file) if name in ("bagua.py", "bagua/__init__.py") else None)


def test_a_module_that_is_loaded_already_is_found(monkeypatch):
    assert _bagua_autoload.in_the_way() is None and _bagua_autoload.NAME == NAME
    monkeypatch.setitem(sys.modules, "bagua", type(sys)("bagua"))
    assert _bagua_autoload.in_the_way() == "nothing"


PROGRAM = """
import torch
import torch.distributed as dist
import _bagua_autoload
_bagua_autoload.register()  # torch 2.4 does not
print("torch is there", flush=True)
dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_torch_is_imported_beside_a_file_of_our_name(tmp_path):
    (tmp_path / "bagua.py").write_text(BAD)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True
    )
    assert done.stdout == "torch is there\n" and done.returncode == 1
    assert str(tmp_path / "bagua.py") in done.stderr and "[BG213]" in done.stderr
