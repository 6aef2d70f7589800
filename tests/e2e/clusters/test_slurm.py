"""Jobs under a real Slurm of two nodes, both of which are this machine. docs/slurm.md has the commands."""

import contextlib
import os
import re
import shlex
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from e2e.conftest import SUM
from rig.clusters.slurm import NODES, Slurm, slurm
from rig.clusters.sshd import Sshd
from rig.docs import pages
from rig.limits import SOON_S
from rig.programs import program
from rig.ranks.elastic import PROGRAM

BATCH = Path(__file__).resolve().parents[3] / "deploy" / "slurm"
PAGE, TUTORIAL = "docs/slurm.md", "docs/tutorials/slurm.md"

# Without torch, whose import costs two seconds of a core.
PLACE = """
    import os
    from bagua.base import launchers

    found = launchers.placement(os.environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
    print(*(found.get(name, "-") for name in names), 10000 <= int(found["MASTER_PORT"]) < 30000, flush=True)
"""

ALONE = """
    import os
    from bagua.base import launchers
    print(launchers.placement(os.environ), launchers.larger_allocation(os.environ))
"""

TELL = """
    import os, sys
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["SLURMD_NODENAME"], sys.argv[1:])
"""

ISLAND = """
    import torch
    import torch.distributed as dist
    import bagua.torch_api as bagua

    bagua.init_process_group()
    inside, between = torch.tensor([1.0 * bagua.get_rank()]), torch.tensor([1.0 * bagua.get_rank()])
    dist.all_reduce(inside)
    bagua.allreduce_inplace(between, bagua.ReduceOp.SUM)
    place = f"rank {bagua.get_rank()} of island {bagua.get_island()} of {bagua.get_replica_count()}"
    print(place, int(inside), int(between), flush=True)
"""
PLACES = {f"rank {rank} of island {rank // 2} of 2 {1 + 4 * (rank // 2)} 6" for rank in range(4)}
"""Sums of the ranks' numbers inside each island, and over all."""

DDP = """
    import os, sys
    import torch
    import torch.distributed as dist
    import bagua.c10d

    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("bagua", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    print("rank", rank, "on", dist.get_backend(), "has", model.module.weight.grad.item(), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm() as found:
        yield found


def srun(sandbox, cluster, *words):
    return sandbox.run(*cluster.command("srun", "--overlap"), *words, env=cluster.env)


def batch(sandbox, cluster, script, *options):
    """Runs a batch script to its end; what it printed is in ``out``."""
    path = sandbox.script("job.sh", script)
    log = sandbox.folder / "job.log"
    words = cluster.command("sbatch", "--wait", f"--output={log}", "--open-mode=append", *options)
    done = sandbox.run(*words, path, env=cluster.env)
    return type(done)(done.code, log.read_text() if log.exists() else "", done.text, done.seconds)


def slurm_run(cluster, *words):
    address = ["--address", cluster.address] if cluster.address else []
    return " ".join(["exec", sys.executable, "-P", "-m", "bagua.cli.main", "slurm", "run", *address, *words])


def typed(sandbox, cluster, command):
    """A line of a page, typed in the environment of the tests; templates are those of this checkout."""
    line = command.replace("deploy/slurm/", f"{BATCH}/")
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    words = cluster.command("env", path, "sh", "-c", shlex.quote(line) if cluster.prefix else line)
    done = sandbox.run(*words, env=cluster.env)
    assert done.code == 0, f"{command}: {done.text}"
    return done


def test_ranks_of_srun_know_their_places(sandbox, cluster):
    script = sandbox.script("place.py", PLACE)
    done = srun(sandbox, cluster, "-N2", "--ntasks-per-node=2", sys.executable, script)
    assert done.code == 0, done.text
    first = sorted(done.out.splitlines())[0].split()[5]
    assert sorted(done.out.splitlines()) == [f"{rank} 4 {rank % 2} 2 {rank // 2} {first} True" for rank in range(4)], (
        done.text
    )
    cyclic = srun(sandbox, cluster, "-N2", "-n4", "--distribution=cyclic", sys.executable, script)
    assert cyclic.code == 0 and all(line.split()[3] == "-" for line in cyclic.out.splitlines()), cyclic.text


def test_python_without_srun_is_told_of_the_allocation(sandbox, cluster):
    script = sandbox.script("alone.py", ALONE)
    done = batch(sandbox, cluster, f"#!/bin/sh\nexec {sys.executable} {script}\n", "-N2", "--ntasks-per-node=2")
    assert done.code == 0 and "{} Slurm job" in done.out and "has 2 nodes and 4 tasks" in done.out, done.text
    one = srun(sandbox, cluster, "-N1", "-n1", sys.executable, script)
    assert one.code == 0 and "Slurm job" not in one.out, one.text


@pytest.mark.full  # others call the same with their own scripts
def test_commands_of_the_pages(sandbox, cluster, tmp_path_factory):
    """By srun, in an allocation, by batch scripts, and over an sshd on this machine, which is both hosts. The template
    asks for four nodes: options before the file say otherwise, as the page has it."""
    test = "test_commands_of_the_pages"
    *slurms, ssh = pages.run_by(test, "docs/running.md")
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    sandbox.script("train.py", SUM)
    log = sandbox.folder / "job.log"
    try:
        for command in {*pages.run_by(test, PAGE, TUTORIAL), *slurms, ssh}:
            log.unlink(missing_ok=True)
            where = cluster
            if command == ssh:
                hosts = ",".join([f"127.0.0.1:{server.port}"] * 2)
                command = command.replace("--hosts h1,h2", f"--hosts {hosts} --ssh {shlex.quote(server.ssh)}")
                where = Slurm()
            elif "train.sbatch" in command:
                command = command.replace("sbatch ", "sbatch -N 2 --ntasks-per-node 2 --time 0:10:00 ", 1)
            done = typed(sandbox, where, command.replace("sbatch ", f"sbatch --wait --output={log} ", 1))
            text = done.out + (log.read_text() if log.exists() else "")
            found = set(re.findall(r"rank \d of \d on node \d has \d+", text))
            assert found == {f"rank {rank} of 4 on node {rank // 2} has 10" for rank in range(4)}, f"{command}: {text}"
    finally:
        server.close()
    sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full
def test_ddp_over_the_backend_under_bare_srun(sandbox, cluster):
    script = sandbox.script("ddp.py", DDP)
    meet = sandbox.folder / "meet"
    done = srun(sandbox, cluster, "-N2", "--ntasks-per-node=1", sys.executable, script, meet)
    assert done.code == 0, done.text
    assert sorted(done.out.splitlines()) == [f"rank {rank} on bagua has 1.5" for rank in (0, 1)], done.text
    sandbox.assert_all_gone(within=SOON_S)


def test_slurm_run_starts_a_daemon_on_each_node(sandbox, cluster):
    sandbox.script("tell.py", TELL)
    done = batch(
        sandbox, cluster, f"#!/bin/bash\n{slurm_run(cluster, 'tell.py', '--a', 'b')}\n", "-N2", "--ntasks-per-node=2"
    )
    assert done.code == 0, done.text
    lines = [line.partition("] ")[2].split() for line in done.out.splitlines() if line.startswith("[rank")]
    assert sorted(line[1] for line in lines) == list("0123"), done.text
    assert len({line[4] for line in lines}) == 2 and all(line[3] == "4" for line in lines), done.text
    assert not list((sandbox.state / "slurm").iterdir())  # the file with the secrets
    sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full
def test_islands(sandbox, cluster):
    """Islands on the nodes of an allocation, elastic or not; under bare srun the variable makes them."""
    script = sandbox.script("island.py", ISLAND)
    commands = [slurm_run(cluster, *words, "--island-size", "2", str(script)) for words in ((), ("--elastic",))]
    commands.append(f"BAGUA_ISLAND_SIZE=2 exec srun --overlap -N2 --ntasks-per-node=2 {sys.executable} {script}")
    for command in commands:
        done = batch(sandbox, cluster, f"#!/bin/bash\n{command}\n", "-N2", "--ntasks-per-node=2")
        assert done.code == 0, f"{command}: {done.text}"
        found = set(re.findall(r"rank \d of island \d of \d \d \d", done.out))
        assert found == PLACES, f"{command}: {done.text}"
    sandbox.assert_all_gone(within=SOON_S)


def test_outside_of_an_allocation(sandbox):
    if "SLURM_JOB_ID" in os.environ:
        pytest.skip("these tests run in an allocation themselves")
    done = sandbox.bagua("slurm", "run", "train.py")
    assert (done.code, done.err.split(".")[0]) == (2, "error: There is no allocation of Slurm here"), done.text


@pytest.fixture
def own(cluster):
    """The cluster, if it is one whose nodes and jobs may be harmed."""
    if cluster.own is None:
        pytest.skip("it preempts jobs and loses nodes: only for a cluster that was made here")
    yield cluster
    cluster.own.recover()


def start_now(sandbox, cluster, job, log):
    """A job that is queued again: Slurm would wait for two minutes. Started in the second in which it was cancelled, it
    may fail (slurmctld: "non-startable batch job: Job credential revoked")."""
    state = (*cluster.command("squeue", "-h", "-j", job, "-o", "%r"),)
    sandbox.wait_until(lambda: "BeginTime" in sandbox.run(*state, env=cluster.env).out, 2 * SOON_S, log.read_text)
    now = cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    assert sandbox.run(*now, env=cluster.env).code == 0


@pytest.mark.full  # two starts of four ranks with torch
def test_a_time_limit_becomes_a_checkpoint_and_a_new_start(sandbox, own):
    """With the files of the tutorial. The signal comes before its time."""
    pages.write_files(TUTORIAL, sandbox.folder)
    submit, look = pages.run_by("test_a_time_limit_becomes_a_checkpoint_and_a_new_start", TUTORIAL)
    job = typed(sandbox, own, submit).out.split()[-1]
    assert job in typed(sandbox, own, look).out
    log = sandbox.folder / f"job-{job}.log"
    sandbox.wait_until(lambda: log.exists() and "begins at step 0" in log.read_text(), 5 * SOON_S, log.read_text)
    typed(sandbox, own, f"scancel --batch --signal=USR1 {job}")
    start_now(sandbox, own, job, log)
    sandbox.wait_until(lambda: re.search("begins at step [1-9]", log.read_text()), 5 * SOON_S, log.read_text)
    assert "is written." in log.read_text()
    typed(sandbox, own, f"scancel {job}")
    sandbox.assert_all_gone(within=2 * SOON_S)


class Elastic:
    """An elastic job with a rank on each of two nodes, started as the tutorial says."""

    def __init__(self, sandbox, cluster):
        self.sandbox, self.cluster, self.log = sandbox, cluster, sandbox.folder / "job.log"
        sandbox.script("train.py", PROGRAM)
        [command] = pages.run_by("test_an_elastic_job_goes_on_without_a_node_that_is_lost", TUTORIAL)
        options = f"--wait --ntasks-per-node=1 --time=0:30:00 --output={self.log}"
        words = command.replace("sbatch ", f"sbatch {options} ", 1).replace("deploy/slurm/", f"{BATCH}/").split()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.waits = sandbox.start(*cluster.command(*words), env={**cluster.env, "PATH": path})
        self.wait_for("of 2 sum 1")

    def wait_for(self, words):
        self.sandbox.wait_until(
            lambda: self.log.exists() and words in self.log.read_text(), 2 * SOON_S, lambda: self.log.read_text()
        )

    def on_second_node(self, program=""):
        """Processes of the job there that have this in their command line."""
        node = f"SLURMD_NODENAME={NODES[1]}\0".encode()
        found = []
        for pid, command in self.sandbox.marked().items():
            with contextlib.suppress(OSError):  # it has ended
                if program in command and node in (Path("/proc") / str(pid) / "environ").read_bytes():
                    found.append(pid)
        return found

    def ends_well(self):
        (self.sandbox.folder / "stop").touch()
        assert self.waits.wait(2 * SOON_S) == 0, self.log.read_text()
        self.sandbox.assert_all_gone(within=SOON_S)


@pytest.mark.full  # e2e/elastic/test_elastic.py has losses
def test_an_elastic_job_goes_on_without_a_node_that_is_lost(sandbox, own):
    job = Elastic(sandbox, own)
    assert own.own is not None
    own.own.lose_the_second_node(job.on_second_node())
    job.wait_for("rank 0 of 1 sum 0")
    job.ends_well()


@pytest.mark.full  # e2e/elastic/test_elastic_changes.py has drains
def test_an_elastic_job_leaves_a_node_that_is_drained(sandbox, own):
    """Slurm's own drain lets jobs end there; a signal to the node's daemon makes them leave."""
    job = Elastic(sandbox, own)
    assert own.own is not None
    own.own.call("scontrol", "update", f"NodeName={NODES[1]}", "State=DRAIN", "Reason=maintenance")
    for pid in job.on_second_node("bagua.hosts.end"):
        os.kill(pid, signal.SIGTERM)
    job.wait_for("rank 0 of 1 sum 0")
    job.wait_for("dismissed")
    job.ends_well()


@pytest.mark.full  # e2e/elastic/test_elastic.py scales jobs
def test_an_elastic_job_is_scaled_while_it_runs(sandbox, own):
    """By a shell on the first node that is opened in a terminal, as the page says; there the variable is set that the
    job's output names."""
    opened, export, *commands = pages.run_by("test_an_elastic_job_is_scaled_while_it_runs", PAGE)
    job = Elastic(sandbox, own)
    number = own.own.call("squeue", "-h", "-o", "%A").split()[0]
    told = re.search(r"Other commands for this job, on (\S+): (export \S+)", job.log.read_text())
    assert told and told[1] == NODES[0], job.log.read_text()
    assert told[2].startswith(export.partition("=")[0]), told[2]
    opened = opened.replace("--jobid 42", f"--jobid {number}").replace("-w n1", f"-w {told[1]}")

    def shell(command):
        lines = f"{told[2]}\\nPATH={Path(sys.executable).parent}:$PATH {command}\\nexit\\n"
        return typed(sandbox, own, f"printf '{lines}' | script -qec '{opened}' /dev/null").out

    said = shell("bagua job list")
    [job_id] = set(re.findall(r"job-[0-9a-f]+", said))
    assert "running" in said, said
    for command in (*commands, "bagua job scale ID 2"):
        if command.endswith("2"):
            job.wait_for("rank 0 of 1 sum 0")
        shell(command.replace("ID", job_id))
    job.wait_for("rank 1 of 2 sum 2")  # a newcomer, the third member
    job.ends_well()


@pytest.mark.parametrize("number, mpirun", [(0, "mpirun.openmpi"), (1, "mpiexec.hydra")])
def test_ranks_of_mpirun_know_their_places(sandbox, number, mpirun):
    path = program(mpirun)
    command = pages.run_by("test_ranks_of_mpirun_know_their_places", PAGE)[number]
    targets = {command.split()[0]: path, "python": sys.executable}
    sandbox.programs(**{name: f'exec {target} "$@"' for name, target in targets.items()})
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    # Files: mpirun mixes the lines of ranks.
    to_file = "import os, sys; sys.stdout = open(f'{os.getpid()}.place', 'w')\n"
    (sandbox.folder / "train.py").write_text(to_file + textwrap.dedent(PLACE))
    done = sandbox.run("sh", "-c", command, env=allowed)
    assert done.code == 0, done.text
    places = sorted(path.read_text().split()[:2] for path in sandbox.folder.glob("*.place"))
    assert places == [[str(rank), "4"] for rank in range(4)], done.text
