"""Checks of the command line before anything is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from bagua.base.errors import ConfigError, UsageError
from bagua.base.job_options import Nodes, default_name, parse_nodes, variables
from bagua.base.replica_check import CheckReplicas
from bagua.cli import job_options, options
from bagua.cli.app import app
from bagua.cli.checks import gpu_checks
from bagua.cli.run import check_script, count_ranks
from bagua.client.specification import job_spec


def test_variables() -> None:
    assert job_options.parse_env(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    assert job_options.parse_env(None) == {}
    for broken in ("A", "=1", ""):
        with pytest.raises(UsageError, match="NAME=VALUE"):
            job_options.parse_env([broken])


def test_secret_variables_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_options.parse_secret_env(None) == {}
    assert job_options.parse_secret_env(["A=f", "B=/x=y"]) == {"A": str(tmp_path / "f"), "B": "/x=y"}
    for broken in ("hf_the_secret_itself", "=f", "A="):
        with pytest.raises(UsageError, match="NAME=FILE"):
            job_options.parse_secret_env([broken])
    with pytest.raises(UsageError, match="given twice"):
        job_options.specification("t.py", {"env": ["A=1"], "secret_env": ["A=f"]})


def test_a_secret_among_the_variables_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    options.warn_of_secrets({"HF_TOKEN": "s3cret", "LR": "1"})
    told = capsys.readouterr().err
    assert "HF_TOKEN" in told and "--secret-env" in told and "LR" not in told and "s3cret" not in told
    options.warn_of_secrets({"LR": "1", "TOKENIZERS_PARALLELISM": "false"})
    assert capsys.readouterr().err == ""


def test_algorithm_becomes_a_variable() -> None:
    assert variables({"env": {"A": "1"}, "algorithm": ""}) == {"A": "1"}
    assert variables({"algorithm": "bytegrad:average=false"}) == {"BAGUA_ALGORITHM": "bytegrad:average=false"}
    for broken, words in (("bytegard", "Known:"), ("bytegrad:average", "key=value")):
        with pytest.raises(UsageError, match=words):
            job_options.specification("t.py", {"algorithm": broken})


def test_the_folder_of_checkpoints_becomes_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert variables({"checkpoint_dir": Path("c")}) == {"BAGUA_CHECKPOINT_DIR": "/tmp/c"}
    found = variables({"env": {"A": "1"}, "checkpoint_dir": "/x/c"})
    assert found == {"A": "1", "BAGUA_CHECKPOINT_DIR": "/x/c"}


def test_the_comparison_of_replicas_becomes_a_variable() -> None:
    for word in CheckReplicas:
        assert job_spec("train.py", check_replicas=word.value).env == {"BAGUA_CHECK_REPLICAS": word.value}
    with pytest.raises(ConfigError, match=r"check_replicas.*BG106"):
        job_spec("train.py", check_replicas="on")


SIZES = ("nnodes", "elastic", "min_nodes", "max_nodes")


def test_nodes() -> None:
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
def test_elastic_jobs(given, fields) -> None:
    assert job_options.spec_nodes(dict(zip(SIZES, given, strict=False))) == fields


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((Nodes(4, 1), False, 1, None), "leave --min-nodes and --max-nodes out"),
        ((None, False, 4, 2), "--min-nodes 4 is more than the 2 nodes"),
        ((Nodes(5), False, 1, 4), "--nnodes 5 is not from 1 to 4"),
    ],
)
def test_elastic_jobs_that_contradict_themselves(given, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        job_options.spec_nodes(dict(zip(SIZES, given, strict=False)))


def test_ranks_of_a_job_that_ends_with_one_are_not_replaced() -> None:
    with pytest.raises(UsageError, match="--respawn needs --elastic"):
        job_options.spec_nodes({"respawn": 1})


def test_names() -> None:
    assert default_name("/somewhere/train.py", module=False) == "train"
    assert default_name("bagua.examples.digits", module=True) == "digits"


def test_scripts(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    check_script("a.py", tmp_path)
    check_script(str(tmp_path / "a.py"), Path("/"))
    with pytest.raises(UsageError, match=r"b\.py does not exist"):
        check_script("b.py", tmp_path)
    with pytest.raises(UsageError, match="__main__"):
        check_script(".", tmp_path)
    (tmp_path / "__main__.py").touch()
    check_script(".", tmp_path)


def test_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert options.resolve_workdir(None) == tmp_path
    with pytest.raises(UsageError, match="no such folder"):
        options.resolve_workdir(Path("nosuch"))


def test_every_option_of_run_and_submit_has_both_spellings() -> None:
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


def test_ranks_are_counted_as_torchrun_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
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


def complete(line: str) -> list[str]:
    """The completions that bash gets for the last word of ``line``."""
    words = {"_BAGUA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    command = [sys.executable, "-P", "-m", "bagua.cli.main"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert complete("bagua job l") == ["list", "logs"]
    assert complete("bagua run --nproc") == ["--nproc-per-node"]


@pytest.mark.parametrize("name", ["coordinator", "daemon", "certs"])
def test_usage_of_services_names_the_command_that_users_type(name: str) -> None:
    command = [sys.executable, "-P", "-m", "bagua.cli.main", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f"Usage: bagua {name} " in done.stdout and "python" not in done.stdout.lower()


@pytest.mark.parametrize(
    ("text", "respawn", "told"),
    [
        ("model(inputs)", 2, True),
        ("model(inputs)", 0, False),
        ("sampler = ElasticSampler(data)", 2, False),
        ("", 2, False),
    ],
)
def test_a_plain_script_takes_no_newcomers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, respawn: int, told: bool
) -> None:
    script = tmp_path / "train.py"
    if text:
        script.write_text(text)
    options.warn_of_newcomers(script, respawn)
    assert ("--respawn" in capsys.readouterr().err) is told
