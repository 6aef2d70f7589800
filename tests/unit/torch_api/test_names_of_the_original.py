"""The original's public names: each is where it was, or docs/from-bagua.md says why it is absent.

``public_names_original.json`` has the names of version 0.9.2: of each public module those that ``__all__`` lists, else
those without an underscore; also names that its documentation tells of. And the public methods of those classes, and
the arguments of what can be called, as in a ``def``; ``...`` stands for a default that is ours to choose.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.bagua_define import BaguaHyperparameter, TensorDtype, get_tensor_declaration_bytes
from bagua.base.errors import ConfigError
from bagua.torch_api import env
from bagua.torch_api.algorithms import AlgorithmImpl
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.contrib import LoadBalancingDistributedSampler

HERE = Path(__file__).resolve().parent
INVENTORY: dict[str, dict[str, Any]] = json.loads((HERE / "public_names_original.json").read_text())
PAGE = HERE.parents[2] / "docs" / "from-bagua.md"
MOST_ABSENT = 20
HOOKS = {
    "need_reset": "self",
    "init_tensors": "self bagua_ddp",
    "tensors_to_buckets": "self tensors do_flatten",
    "init_operations": "self bagua_ddp bucket",
    "init_forward_pre_hook": "self bagua_ddp",
    "init_backward_hook": "self bagua_ddp",
    "init_post_backward_hook": "self bagua_ddp",
    "init_post_optimizer_step_hook": "self bagua_ddp",
}


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


def found(name: str) -> Any:
    """The object of this dotted name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


def deviations(ours: list[Parameter], originals: list[Parameter]) -> list[str]:
    """Calls of the original that ours does not take, by the names of their arguments. Ours may have more arguments,
    behind those, and one that the original demands may have a default."""
    kinds = [one.kind for one in ours]
    if Parameter.VAR_POSITIONAL in kinds and Parameter.VAR_KEYWORD in kinds:
        return []
    wrong = []
    for number, one in enumerate(originals):
        if one.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            fits = one.kind in kinds
        elif number >= len(ours) or ours[number].kind is not Parameter.POSITIONAL_OR_KEYWORD:
            fits = False
        else:
            named = one.kind is Parameter.POSITIONAL_ONLY or one.name == ours[number].name
            free = one.default in (Parameter.empty, ...)
            fits = named and (free or ours[number].default == one.default)
        if not fits:
            wrong.append(one.name)
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return wrong + [
        one.name for one in ours[len(originals) :] if one.default is Parameter.empty and one.kind not in variable
    ]


@pytest.mark.parametrize("name", INVENTORY["signatures"])
def test_arguments_of_the_original(name: str) -> None:
    thing = found(name)
    ours = list(inspect.signature(thing).parameters.values())
    if inspect.isfunction(thing) and ours and ours[0].name == "self":
        ours = ours[1:]
    wanted = eval(f"lambda {INVENTORY['signatures'][name]}: 0")
    assert deviations(ours, list(inspect.signature(wanted).parameters.values())) == []


def subclasses(kind: type) -> list[type]:
    return [kind, *(lower for direct in kind.__subclasses__() for lower in subclasses(direct))]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_take_the_arguments_by_the_names_of_the_original(hook: str) -> None:
    """Subclasses call ``super().init_operations(bagua_ddp=…, bucket=…)``."""
    kinds = [kind for kind in subclasses(AlgorithmImpl) if kind.__module__.startswith("bagua.")]
    assert len(kinds) > 10
    for kind in kinds:
        assert " ".join(inspect.signature(getattr(kind, hook)).parameters) == HOOKS[hook], kind


def test_attributes_of_the_original() -> None:
    tensors = [torch.zeros(3).ensure_bagua_tensor(f"t{number}", "net") for number in range(2)]  # type: ignore[attr-defined]
    assert BaguaBucket(tensors, "b", True).bagua_module_name == "net"
    optimizer = QAdamOptimizer([torch.nn.Parameter(torch.zeros(2))])
    assert QAdamAlgorithm(optimizer).optimizer is optimizer
    sampler = LoadBalancingDistributedSampler("cab", ord, num_replicas=1, rank=0)
    assert sampler.item_complexity_map == {0: 99, 1: 97, 2: 98}
    assert list(sampler.ordered_item_complexity_map) == [1, 2, 0]


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
