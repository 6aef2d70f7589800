"""Each option of a job is declared once, and reaches every place that takes options of jobs."""

from pathlib import Path

import pytest

from bagua.base.errors import ConfigError
from bagua.base.islands import VARIABLE
from bagua.base.job_options import OPTIONS, variables
from bagua.cli import config_file, run
from bagua.cli.job import submit
from bagua.cli.job_options import parameters, specification
from bagua.client import job_spec
from bagua.operator import crd
from bagua.operator.job import parse
from bagua.operator.service import specification as of_manifest
from bagua.proto import common_pb2

COMMANDS = {"run": run.run, "job submit": submit.submit}
FIELDS = common_pb2.JobSpec.DESCRIPTOR.fields_by_name


def example(one):
    """A value that is not the default."""
    if one.choices:
        return str(list(one.choices)[-1])
    given = {bool: True, int: 2, float: 2.5, str: "qadam", Path: "/folder", dict: {"A": "b"}}
    return given.get(one.kind, ["x"])


@pytest.mark.parametrize("one", OPTIONS.values(), ids=OPTIONS)
def test_an_option_reaches_all_places(one):
    value = example(one)
    more = {"elastic": True} if one.name in ("min_nodes", "max_nodes", "respawn") else {}
    if one.name == "island_size":
        more = {"nproc_per_node": 2}
    plain, found = job_spec("train", **more), job_spec("train", **more, **{one.name: value})
    changed = {field for field in FIELDS if getattr(found, field) != getattr(plain, field)}
    assert changed == ({"env"} if one.variable else {one.field or one.name})
    for command in one.commands:
        assert one.name in parameters(command)
        key = parameters(command)[one.name].name.replace("_", "-")
        assert key in {each.key for each in config_file.declared(COMMANDS[command]).values()}
    if one.manifest:
        key = one.name.split("_")[0] + "".join(word.title() for word in one.name.split("_")[1:])
        assert key in crd.spec_schema()["properties"]["run"]["properties"]
        manifest = parse({"image": "i", "nprocPerNode": 2, "run": {"script": "t.py", key: value}})
        bare = parse({"image": "i", "nprocPerNode": 2, "run": {"script": "t.py"}})
        ours, without = of_manifest(manifest, "job"), of_manifest(bare, "job")
        assert {field for field in FIELDS if getattr(ours, field) != getattr(without, field)} == changed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"island_size": 3, "nproc_per_node": 4}, "4 ranks can't be divided into islands of 3"),
        ({"island_size": 4, "nproc_per_node": 2, "nnodes": 2, "elastic": True}, "each island lies on one node"),
        ({"island_size": 2, "nproc_per_node": 2, "elastic": True, "respawn": 1}, "respawn is 1"),
        ({"env": {VARIABLE: "two"}}, "BAGUA_ISLAND_SIZE is 'two'"),
        ({"secret_env": {VARIABLE: "/file"}}, "BAGUA_ISLAND_SIZE is no secret"),
    ],
)
def test_islands_that_do_not_fit_are_refused_before_anything_is_started_or_sent(options, words):
    with pytest.raises(ConfigError, match=rf"{words}.*BG114"):
        job_spec("t.py", **options)


def test_what_is_not_given_has_its_default():
    """The command line, a manifest and Python make the same specification of nothing but a script."""
    given = {name: one.default for name, one in parameters("job submit").items()}
    assert specification("t.py", given) == job_spec("t.py")
    assert job_spec("t.py", **dict.fromkeys(OPTIONS)) == job_spec("t.py")
    assert variables({}) == {}
