"""Checks of the command line before anything is started."""

import os

import pytest
import typer
from typer.main import get_command

from bagua.base.errors import ConfigError, UsageError
from bagua.base.job_options import Nodes, parse_nodes
from bagua.cli import job_options
from bagua.cli.app import app
from bagua.cli.checks import gpu_checks
from bagua.cli.run import count_ranks


def test_secret_variables_name_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert job_options.parse_secret_env(None) == {}
    assert job_options.parse_secret_env(["A=f", "B=/x=y"]) == {"A": str(tmp_path / "f"), "B": "/x=y"}
    for broken in ("hf_the_secret_itself", "=f", "A="):
        with pytest.raises(UsageError, match="NAME=FILE"):
            job_options.parse_secret_env([broken])
    with pytest.raises(UsageError, match="given twice"):
        job_options.specification("t.py", {"env": ["A=1"], "secret_env": ["A=f"]})


SIZES = ("nnodes", "elastic", "min_nodes", "max_nodes")


def test_nodes():
    assert parse_nodes("4") == Nodes(4) and parse_nodes("1:4") == Nodes(4, 1)
    for broken in ("0", "x", "", "1:", ":2", "1:2:3", "5000", "-1"):
        with pytest.raises(ConfigError, match="1:4"):
            parse_nodes(broken)
    with pytest.raises(ConfigError, match="Write 1:4"):
        parse_nodes("4:1")


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ((None, False), {"nnodes": 1, "elastic": False}),
        ((Nodes(4), False), {"nnodes": 4, "elastic": False}),
        ((Nodes(4), True), {"nnodes": 4, "elastic": True}),
        ((Nodes(4, 2), False), {"nnodes": 4, "elastic": True, "min_nodes": 2}),
        ((None, False, 2, 4), {"nnodes": 4, "elastic": True, "min_nodes": 2, "max_nodes": 4}),
        ((Nodes(3), False, 2, None), {"nnodes": 3, "elastic": True, "min_nodes": 2, "max_nodes": 3}),
        ((None, True, None, 3), {"nnodes": 3, "elastic": True, "min_nodes": 1, "max_nodes": 3}),
    ],
)
def test_elastic_jobs(given, fields):
    assert job_options.spec_nodes(dict(zip(SIZES, given, strict=False))) == fields


def test_every_option_of_run_and_submit_has_both_spellings():
    root = get_command(app)
    for path in (["run"], ["job", "submit"]):
        command, context = root, root.make_context("bagua", [*path, "x"], resilient_parsing=True)
        for name in path:
            command = command.get_command(context, name)
        long = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert "--nproc-per-node" in long and "--master-port" in long
        for option in (option for option in long if "-" in option[2:]):
            flag = next(parameter for parameter in command.params if option in parameter.opts).is_flag
            value = [] if flag else ["off" if option == "--check-replicas" else "1"]
            given = [option.replace("-", "_").replace("__", "--", 1), *value, "x.py", "--a_b"]
            made = command.make_context(path[-1], given, parent=context)
            assert made.params["args"] == ["--a_b"], option  # the script's own stay as they are


def test_ranks_are_counted_as_torchrun_counts_them(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert (count_ranks("7"), count_ranks("cpu")) == (7, cores)
    for gpus, expected in (([], cores), (["A", "B", "C"], 3)):
        monkeypatch.setattr(gpu_checks, "probe", lambda gpus=gpus: gpu_checks.Probe(gpus=gpus))
        assert count_ranks("auto") == expected
    assert count_ranks("gpu") == 3
    monkeypatch.setattr(gpu_checks, "probe", gpu_checks.Probe)
    for broken, words in (("gpu", "no GPU"), ("0", "from 1 to"), ("1025", "from 1 to"), ("two", "auto, gpu or cpu")):
        with pytest.raises(typer.BadParameter, match=words):
            count_ranks(broken)
