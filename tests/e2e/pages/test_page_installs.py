"""Blocks of pages that install packages, as they stand, in environments that are thrown away: from nothing, by pip.

Some gigabytes are fetched, because torch comes along. Where no package index can be reached, all of it is skipped.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from rig.clusters import kubernetes
from rig.docs import pages
from rig.limits import SOON_S
from rig.ports import free_port
from rig.system import throwaway
from rig.system.throwaway import Throwaway

from bagua.base.paths import cache_dir

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

INSTALL_S = 30 * SOON_S
PROBE = "pip download --no-deps --dest probe textual"
ADDED = """
import sys
from importlib.metadata import requires, version
from pip._vendor.packaging.requirements import Requirement

for text in requires("bagua"):
    one = Requirement(text)
    if one.marker and any(one.marker.evaluate({"extra": name}) for name in sys.argv[1:]):
        assert one.specifier.contains(version(one.name), prereleases=True), text
print(version("bagua"))
"""
"""Fails unless all packages of these extras of the installed Bagua are there; prints which Bagua it is."""
LOGGED = (
    """
import os
import mlflow
import wandb
import bagua.torch_api as bagua

os.environ["WANDB_MODE"] = "offline"
mlflow.set_tracking_uri("sqlite:///runs.db")
mlflow.start_run()
""",
    """
bagua.report(1, 2, {"loss": 0.25})
mlflow.end_run()
wandb.finish()
""",
)
"""Before and after the lines of the page."""
LOOK = """
import mlflow

mlflow.set_tracking_uri("sqlite:///runs.db")
[run] = mlflow.MlflowClient().search_runs(["0"])
print("loss", run.data.metrics["loss"])
"""
TRAIN = """
from pathlib import Path

FOLDER = Path.cwd()


def train():
    import torch
    from ray.train.torch import prepare_model
    from torch import distributed

    assert distributed.get_backend() == "bagua"
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (FOLDER / f"rank-{rank}").write_text(str([one.tolist() for one in model.parameters()]))


"""
RAY = """
import signal
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("address", cluster.address, flush=True)
signal.sigwait([signal.SIGTERM])
cluster.shutdown()
"""
"""Two Ray nodes of this machine, until a SIGTERM."""
SUMS = """
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import gradient_allreduce

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print("sum", bagua.get_rank(), "of", bagua.get_world_size(), [one.tolist() for one in model.parameters()])
"""
HOROVOD = (
    f"pip install -c {pages.ROOT / 'deploy' / 'constraints.txt'} torch numpy 'setuptools<81' wheel cmake",
    "pip download --no-deps --no-build-isolation --no-binary :all: horovod==0.28.1",
    "tar xf horovod-0.28.1.tar.gz",
    "sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' "
    "horovod-0.28.1/CMakeLists.txt horovod-0.28.1/horovod/torch/CMakeLists.txt",
    "sed -i 's/torch.version.cuda is not None/False/' horovod-0.28.1/cmake/Modules/FindPytorch.cmake",
    "HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 "
    "HOROVOD_WITHOUT_MPI=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 pip install --no-build-isolation ./horovod-0.28.1",
)
"""Its newest release, for the CPU, with Gloo. As it is it asks for C++14, which torch's header files refuse, for CUDA's
toolkit where torch was built with CUDA, and for a CMake before version 4."""
BY_CRON = """
cd /
runuser -u bagua -- env BAGUA_STATE_DIR=/var/lib/bagua bagua coordinator --listen 127.0.0.1:0 &
while [ ! -e /var/lib/bagua/token ]; do sleep 0.1; done
LD_PRELOAD=$(echo /usr/lib/*/faketime/libfaketime.so.1) NO_FAKE_STAT=1 FAKETIME='@2026-11-26 02:59:57' cron -f -L 15 &
while ! ls /var/lib/bagua/backup-?.db 2>/dev/null; do sleep 0.1; done
stat -c '%U %G %a' /var/lib/bagua/backup-?.db
"""
MACHINE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "machine"},
    "status": {
        "capacity": {"cpu": "8", "memory": "32Gi", "pods": "20"},
        "allocatable": {"cpu": "8", "memory": "32Gi", "pods": "20"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}
"""Of a Kubernetes cluster, with room for the tasks of pages."""
SKYPILOT = ("127.0.0.1", 46580)
"""The address of its API server, which it starts by itself."""
AS_TWO_NODES = """
ip link set lo up
export BAGUA_JOB_SECRET=$(openssl rand -hex 32) SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=0
export SKYPILOT_NODE_IPS="$(printf '127.0.0.1\\n127.0.0.1')"
SKYPILOT_NODE_RANK=1 bash run.sh & other=$!
SKYPILOT_NODE_RANK=0 bash run.sh
wait $other
"""
"""The commands of a task with the variables that SkyPilot gives them, on two nodes that are this machine."""
JUPYTER = "c.ServerApp.allow_root = True\nc.ServerApp.open_browser = False\n"


def clone(folder):
    """A copy of the checkout: an installation leaves files in it."""
    words = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(words, cwd=pages.ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (pages.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(pages.ROOT / name, folder / name)
    return folder


class Environment:
    """A fresh one, and somebody who has activated it and types. ``prefix``: a command that runs what is typed."""

    def __init__(self, sandbox, name, *prefix):
        self.sandbox, self.prefix = sandbox, prefix
        self.folder = sandbox.folder / name
        made = sandbox.run(sys.executable, "-m", "venv", self.folder, deadline=INSTALL_S)
        assert made.code == 0, made.text
        home = sandbox.folder / f"home-{name}"
        (home / ".jupyter").mkdir(parents=True)
        (home / ".jupyter" / "jupyter_server_config.py").write_text(JUPYTER)
        self.env = {
            "HOME": str(home),
            "VIRTUAL_ENV": str(self.folder),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "BAGUA_CACHE_DIR": str(cache_dir()),
        }

    def attempt(self, command):
        """To whatever end."""
        command = command.replace("PATH_OF_A_CLONE", str(self.sandbox.folder / "clone"))
        return self.sandbox.run(*self.prefix, "sh", "-c", command, env=self.env, deadline=INSTALL_S)

    def type(self, command):
        """Returns its output; the test fails if the command does."""
        done = self.attempt(command)
        assert done.code == 0, f"{command}: {done.text}"
        return done.out

    def begin(self, command, log):
        """Starts a command in the folder of its log. It gets SIGINT, also where whoever runs the tests ignores that."""
        with log.open("w") as out:
            words = f"cd {log.parent} && exec env --default-signal=INT {command.removesuffix('&')}"
            return self.sandbox.start("sh", "-c", words, env=self.env, stdout=out, stderr=out)

    def added(self, command):
        """The version of Bagua, once it has been seen that the extras which the command names are there."""
        named = [name for names in re.findall(r"\[([\w,]+)\]", command) for name in names.split(",")]
        assert named, command
        script = self.sandbox.script("added.py", ADDED)
        return self.type(f"python {script} {' '.join(named)}").strip()


@pytest.fixture(scope="module")
def environment(core, tmp_path_factory):
    """One in which Bagua was installed from a clone, by the commands of docs/install.md."""
    from tests.e2e.conftest import sandbox_in

    folder = tmp_path_factory.mktemp("installs")
    try:
        with sandbox_in(folder) as sandbox:
            made = Environment(sandbox, "env")
            if (probe := made.attempt(PROBE)).code:
                pytest.skip(f"no package index can be reached: {probe.err.strip().splitlines()[-1]}")
            clone(sandbox.folder / "clone")
            for command in pages.run_by("test_a_clone_and_its_extras", "docs/install.md"):
                made.type(command)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes


def test_a_clone_and_its_extras(environment):
    """The second command leaves Bagua alone, though an index may have another package of that name."""
    _, extras = pages.run_by("test_a_clone_and_its_extras", "docs/install.md")
    ours = environment.added(extras)
    assert f"bagua {ours}" in environment.type("bagua --version")
    assert Path(environment.type("python -c 'import bagua; print(bagua.__path__[0])'").strip()).is_relative_to(
        environment.folder
    )
    assert "No broken requirements" in environment.type("pip check")


EXTRAS = ("accuracy", "dashboard", "frameworks", "kubernetes", "observability", "study", "tutorials/algorithm")


@pytest.mark.parametrize("page", [*(f"docs/{name}.md" for name in EXTRAS), "algorithms/README.md"])
def test_extras_are_added(environment, page):
    before = environment.type("bagua --version")
    for command in pages.run_by("test_extras_are_added", page):
        environment.type(command)
        assert environment.added(command) in before


def test_jupyterlab_opens(environment):
    """In a terminal of its own; it prints the address."""
    install, lab = pages.run_by("test_jupyterlab_opens", "docs/tutorials/notebook.md")
    environment.type(install)
    environment.added(install)
    sandbox, log = environment.sandbox, environment.sandbox.folder / "lab.log"
    with log.open("w") as out:
        process = sandbox.start("sh", "-c", f"exec {lab}", env=environment.env, stdout=out, stderr=out)
    address = re.compile(r"http://127\.0\.0\.1:\d+/lab\?token=\w+")
    found = sandbox.wait_until(lambda: address.search(log.read_text()), 5 * SOON_S, log.read_text)
    with httpx.Client(follow_redirects=True, trust_env=False) as client:
        answer = client.get(found[0], timeout=SOON_S)
        assert answer.status_code == 200 and "<title>JupyterLab</title>" in answer.text
        # Its kernels are those of this environment.
        kernels = client.get(found[0].replace("/lab?", "/api/kernelspecs?"), timeout=SOON_S).json()
    assert kernels["kernelspecs"]["python3"]["spec"]["language"] == "python"
    process.terminate()
    sandbox.finish(process, time.monotonic())


def test_loggers(environment):
    """The lines of the page, after those that a program has for MLflow and Weights & Biases."""
    environment.type("pip install tensorboard mlflow-skinny sqlalchemy alembic wandb")
    folder = environment.sandbox.folder
    lines = pages.part_by("test_loggers", "docs/frameworks.md")
    script = environment.sandbox.script("loggers.py", f"{LOGGED[0]}\n{lines}\n{LOGGED[1]}")
    environment.type(f"python {script}")
    assert "loss 0.25" in environment.type(f"python {environment.sandbox.script('look.py', LOOK)}")
    assert list(folder.rglob("events.out.tfevents.*")), "TensorBoard has a file"
    assert [path for path in folder.rglob("*.wandb") if b"loss" in path.read_bytes()], "and Weights & Biases"


@pytest.mark.parametrize("name", ["deepspeed", "horovod"])
def test_a_script_of_others(environment, name):
    """Before and after the move the same loss is printed. Horovod has an environment of its own; DeepSpeed's launcher
    starts the script of Bagua, too."""
    page = f"docs/moving/{name}.md"
    pages.write_files(page, environment.sandbox.folder)
    [before] = pages.run_by("test_a_script_of_others", page)
    after = ["bagua run --nproc-per-node 2 after.py"]
    if name == "horovod":
        other = Environment(environment.sandbox, name)
        for command in HOROVOD:
            other.type(command)
    else:
        other = environment
        other.type("pip install deepspeed")
        after.append(before.replace("before.py", "after.py"))
    said = [other.type(before), *(environment.type(command) for command in after)]
    losses = [re.findall(r"loss \d+\.\d+", text) for text in said]
    assert losses == [losses[0]] * len(said) and len(losses[0]) == 1, losses


def test_ray(environment):
    """Two workers train over the backend."""
    environment.type('pip install "ray[train]"')
    lines = pages.part_by("test_ray", "docs/ray.md")
    environment.type(f"python {environment.sandbox.script('with_ray.py', TRAIN + lines)}")
    ranks = sorted(path.name for path in environment.sandbox.folder.glob("rank-*"))
    assert ranks == ["rank-0", "rank-1"]
    weights = [(environment.sandbox.folder / name).read_text() for name in ranks]
    assert weights[0] == weights[1], weights


def equal_sums(text):
    """Whether both ranks of ``SUMS`` have told of the same weights."""
    sums = dict(re.findall(r"sum (\d) of 2 (\[.*\])", text))
    return sums.keys() == {"0", "1"} and len(set(sums.values())) == 1


def test_daemons_on_ray(environment):
    """A coordinator, a daemon on each of two Ray nodes, and a job. The daemons end with the script of the page."""
    page, sandbox = "docs/ray.md", environment.sandbox
    environment.type('pip install "ray[train]"')
    folder = sandbox.folder / "service"
    (folder / "program").mkdir(parents=True)
    (folder / "program" / "train.py").write_text(SUMS)
    pages.write_files(page, folder)
    there = {"10.0.0.1:7670": f"127.0.0.1:{free_port()}", "10.0.0.1": "127.0.0.1"}
    there["~/.local/state/bagua"] = str(sandbox.state)
    commands = pages.run_by("test_daemons_on_ray", page)
    for word, own in there.items():
        commands = [command.replace(word, own) for command in commands]
    certs, coordinator, copy, daemons, nodes, submit = commands

    def connected():
        return environment.type(f"cd {folder} && {nodes}").count(" connected ")

    (folder / "cluster.py").write_text(RAY)
    cluster = environment.begin("python cluster.py", log := folder / "cluster.log")
    found = sandbox.wait_until(lambda: re.search(r"^address (\S+)", log.read_text(), re.M), 5 * SOON_S, log.read_text)
    environment.env["RAY_ADDRESS"] = found[1]
    try:
        environment.type(f"cd {folder} && {certs}")
        service = environment.begin(coordinator, log := folder / "coordinator.log")
        sandbox.wait_until((sandbox.state / "token").exists, SOON_S, log.read_text)
        environment.type(f"cd {folder} && {copy}")
        script = environment.begin(daemons, log := folder / "daemons.log")
        sandbox.wait_until(lambda: connected() == 2, 5 * SOON_S, log.read_text)
        said = environment.type(f"cd {folder} && {submit}")
        assert equal_sums(said), said
        script.send_signal(signal.SIGINT)
        sandbox.finish(script, time.monotonic())
        sandbox.wait_until(lambda: connected() == 0, SOON_S, log.read_text)
        service.terminate()
        sandbox.finish(service, time.monotonic())
    finally:
        del environment.env["RAY_ADDRESS"]
        cluster.terminate()
        sandbox.finish(cluster, time.monotonic(), 5 * SOON_S)


def test_nvcc_of_pip(environment):
    """On a machine without another one, it is the one that builds kernels."""
    for command in pages.run_by("test_nvcc_of_pip", "docs/gpu.md"):
        environment.type(command)
    [nvcc] = environment.folder.glob("lib/*/site-packages/nvidia/cu*/bin/nvcc")
    assert "release 13.0" in environment.type(f"{nvcc} --version")
    found = environment.type("python -c 'from bagua.csrc import build_cuda; print(build_cuda.find_nvcc().path)'")
    assert shutil.which("nvcc") or "CUDA_HOME" in os.environ or found.strip() == str(nvcc)


def test_versions_of_torch(environment):
    """One of those that the page names, beside the packages of the environment that runs this test."""
    [command] = pages.run_by("test_versions_of_torch", "docs/torch-distributed.md")
    one = command.replace(".venv", sys.prefix).replace(" 2.8.0 2.10.0", " 2.8.0")
    assert one.endswith(" 2.8.0"), one
    said = environment.type(f"cd clone && {one}")
    shutil.rmtree(environment.sandbox.folder / "clone" / ".venv-torch-2.8.0")
    assert re.search(r"^\| 2\.8\.0 \| [1-9]\d+ \| \d+ \| 0 \|", said, re.MULTILINE), said


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a host without a network is a network namespace")
def test_a_host_without_a_network(environment):
    """Wheels are made on one host, and installed on another one."""
    *pack, unpack, install = pages.run_by("test_a_host_without_a_network", "docs/install.md")
    for command in pack:
        environment.type(command)
    sandbox = environment.sandbox
    shutil.rmtree(sandbox.folder / "wheels")
    other = Environment(sandbox, "offline", "unshare", "--net", "env", "--unset=PIP_FIND_LINKS")
    other.env["PIP_CONFIG_FILE"] = os.devnull
    for command in (unpack, install):
        other.type(command)
    assert other.added(install) == environment.added(install)
    assert "No broken requirements" in other.type("pip check")


@pytest.fixture(scope="module")
def machine(environment, tmp_path_factory):
    """A copy of this one, with the packages and files that docs/install.md puts on a host of a service."""
    folder = tmp_path_factory.mktemp("machine")
    if reason := throwaway.reason_to_skip(folder):
        pytest.skip(reason)
    made = Throwaway(folder)
    try:
        made.sh("echo 'APT::Get::Assume-Yes \"true\";' > /etc/apt/apt.conf.d/yes", SOON_S)
        if (probe := made.attempt("apt-get update && apt-get install --simulate cron", INSTALL_S)).returncode:
            pytest.skip(f"no packages of the distribution can be fetched: {probe.stdout.strip().splitlines()[-1]}")
        [host] = pages.texts_run_by("test_a_host_of_a_service", "docs/install.md")
        made.sh(host.replace("PATH_OF_A_CLONE", str(environment.sandbox.folder / "clone")), INSTALL_S)
        [units] = pages.texts_run_by("test_the_page_installs_a_service", "docs/install.md")
        made.sh(f"DESTDIR=; {units}", SOON_S)
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.root
def test_a_host_of_a_service(machine):
    said = machine.sh("readlink -f /usr/bin/bagua; cd /; runuser -u bagua -- bagua --version", SOON_S)
    assert said.startswith("/opt/bagua/bin/bagua\nbagua "), said
    assert "coordinator.env" in machine.sh("ls /etc/bagua", SOON_S)


@pytest.mark.root
def test_postgresql_of_the_distribution(machine):
    [command] = pages.run_by("test_postgresql_of_the_distribution", "docs/operations.md")
    machine.sh(command, INSTALL_S)
    assert "/bin/initdb" in machine.sh("ls /usr/lib/postgresql/*/bin/initdb; id postgres", SOON_S)


@pytest.mark.root
def test_a_backup_by_cron(machine):
    """A real cron, for which it is soon three o'clock."""
    [table] = pages.texts_run_by("test_a_backup_by_cron", "docs/operations.md")
    machine.sh("apt-get install cron libfaketime", INSTALL_S)
    (machine.folder / "upper" / "etc" / "cron.d" / "bagua").write_text(f"{table}\n")
    said = machine.sh(BY_CRON, 5 * SOON_S)
    assert re.search(r"backup-[1-7]\.db$", said, re.MULTILINE) and "bagua bagua 600" in said, said


@pytest.mark.root
def test_a_task_of_skypilot(environment, machine, tmp_path):
    """A dry run, which ends where machines would be asked for, against the API server of a real Kubernetes. Then the
    commands of the task, as two nodes."""
    if reason := kubernetes.missing():
        pytest.skip(reason)
    with socket.socket() as probe:
        if probe.connect_ex(SKYPILOT) == 0:
            pytest.skip("somebody's API server of SkyPilot runs on this machine")
    check, launch, secrets, launch_daemons = pages.run_by("test_a_task_of_skypilot", "docs/skypilot.md")
    dry = "--dryrun --yes --image-id docker:debian:12"  # else it asks GitHub for the name of its own image
    machine.sh("apt-get install rsync socat netcat-openbsd && python3 -m venv /opt/sky", INSTALL_S)
    machine.sh("/opt/sky/bin/pip install 'skypilot[kubernetes]'", INSTALL_S)
    folder = environment.sandbox.folder / "clone"
    here = f"cd {folder}; export KUBECONFIG={tmp_path / 'kubeconfig'} PATH=/opt/sky/bin:$PATH; {check}"
    plane = kubernetes.ControlPlane(tmp_path)
    plane.start()
    try:
        with plane.api() as api:
            assert api.post("/api/v1/nodes", json=MACHINE).is_success
        environment.type("cd clone && bagua certs certs/ --host 127.0.0.1 && echo 1 > token")
        machine.sh(f"cd {folder}; {secrets}", SOON_S)
        for command in (launch, launch_daemons):
            said = machine.sh(f"{here}; {command} {dry}", 5 * SOON_S)
            assert "(2 nodes)" in said and "Dryrun finished." in said, said
        refused = machine.attempt(f"{here}; {launch.partition(' --secret')[0]} {dry}", 5 * SOON_S)
        assert refused.returncode and "secret(s): BAGUA_JOB_SECRET" in refused.stdout, refused.stdout
    finally:
        plane.stop()
    task = yaml.safe_load((pages.DOCS / "skypilot.yaml").read_text())
    for name in ("setup", "run"):
        environment.sandbox.script(f"clone/{name}.sh", task[name])
    environment.type("cd clone && bash setup.sh")
    said = environment.type(f"cd clone && unshare --net sh -euc {shlex.quote(AS_TWO_NODES)}")
    assert re.search(r"replicas \(4\) +yes", said), said


def test_daemons_of_skypilot(environment):
    """The commands of the task, as two nodes that are this machine, with a coordinator and a job."""
    sandbox, folder = environment.sandbox, environment.sandbox.folder / "sky"
    (folder / "program").mkdir(parents=True)
    (folder / "program" / "train.py").write_text(SUMS)
    address = f"127.0.0.1:{free_port()}"
    _, _, secrets, launch = pages.run_by("test_a_task_of_skypilot", "docs/skypilot.md")
    assert launch.endswith("--env BAGUA_COORDINATOR=10.0.0.1:7670")
    task = yaml.safe_load((pages.DOCS / "skypilot-daemons.yaml").read_text())
    [(target, source)] = task["file_mounts"].items()
    assert (target, source) == ("~/bagua-secrets", "secrets")
    (folder / "run.sh").write_text(task["run"])
    environment.type(f"cd {folder} && bagua certs certs/ --host 127.0.0.1")
    state = folder / "state"
    log = folder / "coordinator.log"
    service = environment.begin(f"bagua coordinator --listen {address} --tls certs/ --state-dir {state}", log)
    sandbox.wait_until((state / "token").exists, SOON_S, log.read_text)
    environment.type(f"cd {folder} && cp {state}/token token && {secrets}")
    shutil.copytree(folder / source, Path(environment.env["HOME"]) / "bagua-secrets")
    given = f"SKYPILOT_NODE_IPS='127.0.0.1\n127.0.0.1' BAGUA_COORDINATOR={address}"
    environment.type(f"cd {folder} && chmod -R go+r {environment.env['HOME']}/bagua-secrets")  # as a copy may be
    daemons = [
        environment.begin(f"env SKYPILOT_NODE_RANK={rank} {given} bash run.sh", folder / f"daemon-{rank}.log")
        for rank in (0, 1)
    ]
    reach = f"--coordinator {address} --tls certs/ --token-file token"

    def names():
        said = environment.type(f"cd {folder} && bagua node list {reach}")
        return sorted(re.findall(r"^(sky-\d)\S* .* connected ", said, re.M))

    sandbox.wait_until(lambda: names() == ["sky-0", "sky-1"], 5 * SOON_S, (folder / "daemon-1.log").read_text)
    job = f"bagua job submit {reach} --nnodes 2 --nproc-per-node 1 --working-dir program --watch train.py"
    said = environment.type(f"cd {folder} && {job}")
    assert equal_sums(said), said
    for process in (*daemons, service):
        process.terminate()
        sandbox.finish(process, time.monotonic())
