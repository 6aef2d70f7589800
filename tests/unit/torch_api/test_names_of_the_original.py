"""Names that programs import are where they were: the original's (docs/from-bagua.md says why one is absent), and ours.

``public_names.json`` has of the original's version 0.9.2: ``names`` of each public module (of ``__all__``, else those
without an underscore, and those that its documentation tells of); ``members``, public methods of classes;
``signatures``, as in a ``def``, where ``...`` is a default that is ours to choose. Of ours: ``ours`` (version 0.1),
``attributes``.
"""

import importlib
import inspect
import json
import re
from inspect import Parameter
from pathlib import Path

import pytest
import torch

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.torch_api import env
from bagua.torch_api.algorithms import AlgorithmImpl

HERE = Path(__file__).resolve().parent
INVENTORY = json.loads((HERE / "public_names.json").read_text())
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


def exists(owner, name):
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


def absent_names():
    """Names, and methods of classes that are not absent themselves."""
    found = {f"{module}.{name}" for module, names in INVENTORY["names"].items() for name in names}
    found = {name for name in found if not exists(*name.rsplit(".", 1))}
    for owner, methods in INVENTORY["members"].items():
        module, _, name = owner.rpartition(".")
        if owner not in found:
            kind = getattr(importlib.import_module(module), name)
            found |= {f"{owner}.{method}" for method in methods if not hasattr(kind, method)}
    return found


def test_absent_names_are_few_and_on_the_page():
    absent = absent_names()
    listed = re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(absent)
    assert len(absent) <= MOST_ABSENT


def found(name):
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


def deviations(ours, originals):
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


@pytest.mark.parametrize("owner", INVENTORY["signatures"])
def test_arguments_of_the_original(owner):
    for name, arguments in INVENTORY["signatures"][owner].items():
        assert_takes(found(f"{owner}.{name}"), arguments)


def assert_takes(thing, arguments):
    ours = list(inspect.signature(thing).parameters.values())
    if inspect.isfunction(thing) and ours and ours[0].name == "self":
        ours = ours[1:]
    wanted = eval(f"lambda {arguments}: 0")
    assert deviations(ours, list(inspect.signature(wanted).parameters.values())) == []


def subclasses(kind):
    return [kind, *(lower for direct in kind.__subclasses__() for lower in subclasses(direct))]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_take_the_arguments_by_the_names_of_the_original(hook):
    """Subclasses call ``super().init_operations(bagua_ddp=…, bucket=…)``."""
    kinds = [kind for kind in subclasses(AlgorithmImpl) if kind.__module__.startswith("bagua.")]
    assert len(kinds) > 10
    for kind in kinds:
        assert " ".join(inspect.signature(getattr(kind, hook)).parameters) == HOOKS[hook], kind


def test_settings_that_the_original_read(monkeypatch):
    for name in ("BAGUA_AUTOTUNE_WARMUP_TIME_S", "BAGUA_SERVICE_PORT", "BAGUA_IS_OUTPUT_AUTOTUNE_LOG"):
        monkeypatch.delenv(name, raising=False)
    assert (env.get_bagua_service_port(), env.get_autotune_warmup_time_s()) == (-1, 30.0)
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    assert env.get_is_output_autotune_log() is False
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "soon")
    with pytest.raises(ConfigError, match="BAGUA_AUTOTUNE_WARMUP_TIME_S is 'soon'"):
        env.get_autotune_warmup_time_s()


@pytest.mark.parametrize("module", INVENTORY["ours"])
def test_names_of_version_0_1(module):
    known = importlib.import_module(module)
    assert [name for name in INVENTORY["ours"][module] if not hasattr(known, name)] == []


@pytest.mark.parametrize("owner", INVENTORY["attributes"])
def test_attributes(owner):
    assert [name for name in INVENTORY["attributes"][owner] if not hasattr(found(owner), name)] == []


def test_reduce_ops_have_the_numbers_of_the_original():
    found = {op.name: op.value for op in bagua.ReduceOp}
    assert found == {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BOR": 7, "BAND": 8, "BXOR": 9, "AVG": 10}


def test_modules_gain_with_bagua_and_its_properties():
    model = torch.nn.Linear(1, 1)
    parameters = inspect.signature(type(model).with_bagua).parameters
    own = ["step_in_backward", "autotune", "tune"]
    assert list(parameters) == ["self", "optimizers", "algorithm", "process_group", "do_flatten", *own]
    assert model.bagua_algorithm is None and model.bagua_buckets is None and model.bagua_optimizers is None
    assert model.bagua_module_name is None
    for name in dir(torch.nn.Module()):  # torch.compile reads them all
        getattr(torch.nn.Module(), name)
    model.bagua_module_name = "mine"
    assert model.bagua_module_name == "mine"


def test_calls_before_the_start_say_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        bagua.allreduce_inplace(torch.zeros(1))
    with pytest.raises(RuntimeError, match="init_process_group"):
        torch.nn.Linear(1, 1).with_bagua([], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
    bagua.report(step=1)  # never fails the training
    bagua.destroy_process_group()
