"""The original's launchers: each option reaches ``bagua run`` or torchrun, or says what does its work."""

from pathlib import Path

import pytest
import typer

from bagua.base.errors import UsageError
from bagua.base.option_names import hyphens
from bagua.cli.app import app
from bagua.distributed import flags, launch, run
from bagua.hosts import ssh
from bagua.script import baguarun

DOCS = Path(__file__).resolve().parents[3] / "docs" / "launchers.md"
LAUNCHERS = {"launch": launch, "run": run, "baguarun": baguarun}


def names(parser):
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
def test_every_option_of_the_original_is_there_in_both_spellings_and_on_the_page(launcher):
    known = [name for spellings in names(LAUNCHERS[launcher].get_args_parser()) for name in spellings]
    page = DOCS.read_text()
    for name in ORIGINAL[launcher].split():
        assert name in known and (len(name) == 2 or "--" + hyphens(name[2:]) in known), name
        assert f"`{name}" in page, f"{name} of {launcher} is not in docs/launchers.md"


def command(words):
    """Checks that ``bagua run`` knows these options."""
    parser = typer.main.get_command(app).get_command(None, "run")
    parser.make_context("run", list(words))
    return " ".join(words)


def test_launch_on_one_host_is_a_job_of_bagua_run():
    given = "--nproc_per_node=2 --master-port 1234 --logdir logs --enable_bagua_net main.py --algorithm async -m"
    options = launch.parse_args(given.split())
    wanted = "--nproc-per-node 2 --name main --master-port 1234 --log-dir logs --enable-bagua-net main.py"
    assert command(launch.run_arguments(options)) == f"{wanted} --algorithm async -m"
    assert flags.variables(options) == {}


def test_launch_on_several_hosts_is_torchruns():
    given = "--nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=192.168.1.1 --master_port=1234 train.py --lr 1"
    words = launch.torchrun_arguments(launch.parse_args(given.split()))
    place = "--nnodes=2 --node-rank=1 --nproc-per-node=8 --master-addr=192.168.1.1 --master-port=1234 --max-restarts=0"
    assert words == [*place.split(), "train.py", "--lr", "1"]
    more = launch.parse_args(["--nnodes=2", "--logdir", "x", "--no_python", "bash", "run.sh"])
    assert launch.torchrun_arguments(more)[-6:] == [
        *("--log-dir=x", "--redirects=3", "--tee=3"),
        *("--no-python", "bash", "run.sh"),
    ]


@pytest.mark.parametrize("own", ["-t 3", "--redirects 1", "--role worker", "--start_method fork", "--nnodes=2"])
def test_options_of_torchrun_alone_are_torchruns(own):
    options = run.parse_args([*own.split(), "--nproc_per_node=1", "x.py"])
    assert not run.on_this_host(options)
    assert "--master-port=29500" in run.torchrun_arguments(options)


def test_every_host_gets_the_same_job_and_its_own_number(monkeypatch):
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
