"""The original's public names: each is where it was, or docs/from-bagua.md says why it is absent.

``public_names_original.json`` has the names of version 0.9.2: of each public module those that ``__all__`` lists, else
those without an underscore; also names that its documentation tells of. And the public methods of those classes.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from bagua.bagua_define import BaguaHyperparameter, TensorDtype, get_tensor_declaration_bytes
from bagua.base.errors import ConfigError
from bagua.torch_api import env

HERE = Path(__file__).resolve().parent
INVENTORY: dict[str, dict[str, list[str]]] = json.loads((HERE / "public_names_original.json").read_text())
PAGE = HERE.parents[1] / "docs" / "from-bagua.md"
MOST_ABSENT = 20


def exists(owner: str, name: str) -> bool:
    """Whether ``from owner import name`` works; ``owner`` may be a class."""
    try:
        found = importlib.import_module(owner)
    except ModuleNotFoundError:
        return False
    if not hasattr(found, name):
        try:
            importlib.import_module(f"{owner}.{name}")
        except ModuleNotFoundError:
            return False
    return True


def absent_names() -> set[str]:
    """Names, and methods of classes that are not absent themselves."""
    found = {f"{module}.{name}" for module, names in INVENTORY["names"].items() for name in names}
    found = {name for name in found if not exists(*name.rsplit(".", 1))}
    for owner, methods in INVENTORY["members"].items():
        module, _, name = owner.rpartition(".")
        if owner not in found:
            kind = getattr(importlib.import_module(module), name)
            found |= {f"{owner}.{method}" for method in methods if not hasattr(kind, method)}
    return found


def test_absent_names_are_few_and_on_the_page() -> None:
    absent = absent_names()
    listed = re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(absent)
    assert len(absent) <= MOST_ABSENT


def test_the_page_counts_right() -> None:
    names = sum(map(len, INVENTORY["names"].values()))
    methods = sum(map(len, INVENTORY["members"].values()))
    assert f"{names} names and {methods} methods in {len(INVENTORY['names'])} modules" in PAGE.read_text()


def test_settings_that_the_original_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAGUA_AUTOTUNE_WARMUP_TIME_S", "BAGUA_SERVICE_PORT", "BAGUA_IS_OUTPUT_AUTOTUNE_LOG"):
        monkeypatch.delenv(name, raising=False)
    assert (env.get_bagua_service_port(), env.get_autotune_warmup_time_s()) == (-1, 30.0)
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    assert env.get_is_output_autotune_log() is False
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "soon")
    with pytest.raises(ConfigError, match="BAGUA_AUTOTUNE_WARMUP_TIME_S is 'soon'"):
        env.get_autotune_warmup_time_s()


def test_declarations_of_tensors() -> None:
    assert get_tensor_declaration_bytes({"name": "w", "num_elements": 3, "dtype": TensorDtype.F16}) == 6
    changed = BaguaHyperparameter().update({"bucket_size": 7, "other": 1})
    assert changed == BaguaHyperparameter([], 7, False)
