"""The original's launchers: each option reaches ``bagua run`` or torchrun, or says what does its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bagua.base.errors import UsageError
from bagua.base.option_names import hyphens
from bagua.cli.app import app
from bagua.distributed import flags, launch, local_rank, run
from bagua.hosts import ssh
from bagua.script import baguarun

DOCS = Path(__file__).resolve().parents[3] / "docs" / "launchers.md"
LAUNCHERS = {"launch": launch, "run": run, "baguarun": baguarun}


def names(parser: flags.Parser) -> list[list[str]]:
    """The spellings of every option."""
    return [list(action.option_strings) for action in parser._actions if action.option_strings]


# The options of 0.9.2.
ORIGINAL = {
    "launch": "--nnodes --node_rank --nproc_per_node --master_addr --master_port --bagua_service_port "
    "--set_additional_flag -m --module --no_python --logdir --autotune_level --is_output_autotune_log --report_metrics "
    "--autotune_max_samples --autotune_sampling_confidence_time --autotune_warmup_time --default_bucket_size "
    "--enable_bagua_net --host_list --ssh_port",
    "run": "--nnodes --nproc_per_node --rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf --standalone --max_restarts "
    "--monitor_interval --start_method --role -m --module --no_python --run_path --log_dir -r --redirects -t --tee "
    "--node_rank --master_addr --master_port --use_env --bagua_service_port --default_bucket_size --autotune_level "
    "--autotune_max_samples --autotune_sampling_confidence_time --autotune_warmup_time --is_output_autotune_log "
    "--enable_bagua_net",
    "baguarun": "--host_list --ssh_port --nproc_per_node --master_port --bagua_service_port --no_python "
    "--enable_bagua_net -x",
}


@pytest.mark.parametrize("launcher", ORIGINAL)
def test_every_option_of_the_original_is_there_in_both_spellings_and_on_the_page(launcher: str) -> None:
    known = [name for spellings in names(LAUNCHERS[launcher].get_args_parser()) for name in spellings]
    page = DOCS.read_text()
    for name in ORIGINAL[launcher].split():
        assert name in known and (len(name) == 2 or "--" + hyphens(name[2:]) in known), name
        assert f"`{name}" in page, f"{name} of {launcher} is not in docs/launchers.md"


def command(words: list[str]) -> str:
    """Checks that ``bagua run`` knows these options."""
    parser = typer.main.get_command(app).get_command(None, "run")  # type: ignore[attr-defined, arg-type]
    parser.make_context("run", list(words))
    return " ".join(words)


def test_launch_on_one_host_is_a_job_of_bagua_run() -> None:
    given = "--nproc_per_node=2 --master-port 1234 --logdir logs --enable_bagua_net main.py --algorithm async -m"
    options = launch.parse_args(given.split())
    wanted = "--nproc-per-node 2 --name main --master-port 1234 --log-dir logs --enable-bagua-net main.py"
    assert command(launch.run_arguments(options)) == f"{wanted} --algorithm async -m"
    assert flags.variables(options) == {}


def test_launch_on_several_hosts_is_torchruns() -> None:
    given = "--nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=192.168.1.1 --master_port=1234 train.py --lr 1"
    words = launch.torchrun_arguments(launch.parse_args(given.split()))
    place = "--nnodes=2 --node-rank=1 --nproc-per-node=8 --master-addr=192.168.1.1 --master-port=1234 --max-restarts=0"
    assert words == [*place.split(), "train.py", "--lr", "1"]
    more = launch.parse_args(["--nnodes=2", "--logdir", "x", "--no_python", "bash", "run.sh"])
    assert launch.torchrun_arguments(more)[-6:] == [
        *("--log-dir=x", "--redirects=3", "--tee=3"),
        *("--no-python", "bash", "run.sh"),
    ]


def test_options_of_the_original_become_variables_of_the_ranks() -> None:
    given = (
        "--autotune_level 1 --autotune_max_samples 5 --autotune_sampling_confidence_time 2.5 --autotune_warmup_time 9"
    )
    more = "--default_bucket_size 1024 --is_output_autotune_log x.py"
    assert flags.variables(launch.parse_args(f"{given} {more}".split())) == {
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_MAX_SAMPLES": "5",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "2.5",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S": "9.0",
        "BAGUA_DEFAULT_BUCKET_SIZE": "1024",
        "BAGUA_IS_OUTPUT_AUTOTUNE_LOG": "1",
    }


def test_options_without_work_say_what_does_it() -> None:
    given = "--report_metrics --host_list a,b --ssh_port 22 --bagua_service_port 1 x.py"
    told = " ".join(launch.notes(launch.parse_args(given.split())))
    assert all(words in told for words in ("bagua job show", "baguarun", "--ssh_port", "--bagua_service_port")), told
    told = " ".join(run.notes(run.parse_args("--use_env --monitor_interval 1 --nproc_per_node 1 x.py".split())))
    assert "--use_env" in told and "--monitor_interval" in told


def test_run_on_one_host_is_a_job_of_bagua_run() -> None:
    options = run.parse_args("--standalone --nnodes=1 --nproc_per_node=2 --log_dir d -m pkg.train --x".split())
    assert run.on_this_host(options)
    words = command(run.run_arguments(options))
    assert words == "--nproc-per-node 2 --max-restarts 3 --log-dir d -m pkg.train --x"


@pytest.mark.parametrize("own", ["-t 3", "--redirects 1", "--role worker", "--start_method fork", "--nnodes=2"])
def test_options_of_torchrun_alone_are_torchruns(own: str) -> None:
    options = run.parse_args([*own.split(), "--nproc_per_node=1", "x.py"])
    assert not run.on_this_host(options)
    assert "--master-port=29500" in run.torchrun_arguments(options)


def test_programs_may_call_run_and_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """They return when the job has succeeded. What a program changes in the arguments counts."""
    ends, told = [0, 3], []

    def job(words: list[str], **_: str) -> None:
        told.append(words)
        sys.exit(ends.pop(0))

    monkeypatch.setattr("bagua.cli.app.app", job)
    monkeypatch.setattr("torch.distributed.run.main", told.append)
    args = run.parse_args(args=["--nproc_per_node=1", "x.py"])
    args.nproc_per_node = "2"
    run.run(args)
    with pytest.raises(SystemExit) as end:
        run.main(["--nproc_per_node=2", "x.py"])
    assert end.value.code == 3 and told[0] == told[1] and "--nproc-per-node" in told[0]
    several = ["--nnodes=2", "--nproc_per_node=1", "x.py"]
    run.main(args=several)
    assert told[2] == run.torchrun_arguments(run.parse_args(several))
    assert run.get_rdzv_endpoint(run.parse_args(several)) == "127.0.0.1:29500"
    config, program, words = run.config_from_args(run.parse_args(several))
    assert (config.min_nodes, config.nproc_per_node, program, words) == (2, 1, sys.executable, ["-u", "x.py"])
    for wrong in ("x", "0"):
        with pytest.raises(ValueError, match=r"\[BG102\]"):
            run.determine_local_world_size(nproc_per_node=wrong)
    with pytest.raises(ValueError, match=r"\[BG110\]"):
        run.parse_min_max_nnodes("1:2:3")


def test_an_elastic_job_is_torchruns() -> None:
    given = "--nnodes=1:4 --nproc_per_node=8 --rdzv_id=JOB_ID --rdzv_backend=c10d --rdzv_endpoint=192.168.1.1:1234"
    options = run.parse_args([*given.split(), "main.py"])
    assert not run.on_this_host(options)
    assert sorted(run.torchrun_arguments(options)) == sorted(
        "--nnodes=1:4 --nproc-per-node=8 --rdzv-id=JOB_ID --rdzv-backend=c10d --rdzv-endpoint=192.168.1.1:1234 "
        "--max-restarts=3 main.py".split()
    )


@pytest.mark.parametrize(
    ("launcher", "given", "told"),
    [
        (run, "--nnodes 4:1 x.py", "4:1"),
        (run, "--nproc_per_node many x.py", "many"),
        (run, "--run_path -m x", "--run_path"),
        (baguarun, "--nproc_per_node 1 x.py", "--host_list"),
        (baguarun, "--nproc_per_node 1 --host_list h1:ssh x.py", "'ssh' is no port"),
        (baguarun, "--nproc_per_node 1 --host_list=-oProxyCommand=x x.py", "is no host"),
    ],
)
def test_bad_options_are_told_at_once(launcher: object, given: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(baguarun.HOSTS_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=told):
        launcher.parse_args(given.split())  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["--nproc_per_node 0 x.py", "-m --no_python x", "--autotune_warmup_time ! x.py", ""])
def test_what_argparse_refuses(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch.parse_args(given.split())
    assert "usage: bagua.distributed.launch" in capsys.readouterr().err


def test_a_node_rank_beyond_the_nodes() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bagua.distributed.launch", "--nnodes=2", "--node_rank=2", "x.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (2, "error: --node_rank 2: the job has 2 nodes, counted from 0. [BG110]\n")


def test_the_local_rank_comes_first() -> None:
    assert local_rank.command(["x.py", "--a"], "3") == [sys.executable, "x.py", "--local_rank=3", "--a"]
    assert local_rank.command(["-m", "pkg.x"], "0") == [sys.executable, "-m", "pkg.x", "--local_rank=0"]
    assert local_rank.command(["--no-python", "bash", "x.sh"], "1") == ["bash", "--local_rank=1", "x.sh"]


def test_hosts() -> None:
    cases = {
        "h1": ssh.Host("h1", 22),
        "al@h1:2222": ssh.Host("al@h1", 2222),
        "[fe80::1]:7": ssh.Host("fe80::1", 7),
        "fe80::1": ssh.Host("fe80::1", 22),
    }
    assert {text: ssh.parse_host(text, 22, "--hosts") for text in cases} == cases
    assert ssh.Host("al@h1").address == "h1"


def test_every_host_gets_the_same_job_and_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(baguarun.HOSTS_VARIABLE, "al@h1,h2:7")
    monkeypatch.setenv(baguarun.PORT_VARIABLE, "22")
    options = baguarun.parse_args("-x A=1 -x B --nproc_per_node=8 --master_port 1 train.py -x C".split())
    assert baguarun.launch_arguments(options, 1) == (
        "--nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=h1 --master_port=1 train.py -x C".split()
    )
    found = baguarun.environment(options, {"B": "2", "PATH": "/bin", "HOME": "/root"})
    assert len(found.pop(baguarun.SECRET)) == 64
    assert found == {"A": "1", "B": "2", "PATH": "/bin"}
    with pytest.raises(UsageError, match="-x B"):
        baguarun.environment(options, {})
    command = ssh.ssh_command(options.hosts[1], "ssh -v", "/a b", "/opt/python")
    assert command[:2] == ["ssh", "-v"] and command[-4:-1] == ["7", "--", "h2"]
    assert command[-1] == "cd '/a b' && exec /opt/python -P -m bagua.hosts.end"


def test_a_secret_of_the_users_is_taken() -> None:
    options = baguarun.parse_args("--host_list a,b --nproc_per_node=1 x.py".split())
    given = {"BAGUA_JOB_SECRET_FILE": "/shared/secret"}
    assert baguarun.environment(options, given) == given
