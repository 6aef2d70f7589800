"""The commands of the pages for operators, as they stand there: each page is played on a host of its own, in order.

The host is a network namespace with the addresses and ports that the pages name, and a home folder.
``rig/docs/pages.py`` says which blocks are played. Tutorials and how-to pages are followed in the same way, with the
files that they show.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from rig.clusters import kubelet, kubernetes
from rig.clusters.sshd import Sshd
from rig.docs import page_scripts, pages
from rig.limits import SOON_S
from rig.system import other_users
from rig.system.postgres import as_postgres, binaries

from bagua.base.paths import cache_dir

pytestmark = pytest.mark.root

SERVICE = re.compile(r"bagua (coordinator|daemon|dashboard)(?= -|$)")
UNIT = re.compile(r"systemctl (start|stop) bagua-coordinator$")
ANN = 54321
"""The number of a user of docs/security.md."""
ADDRESSES = ("10.0.0.1/24", "10.0.0.2/24")
FILES = {"train.py": "print('trained')\n", "hf.token": "a secret\n", "coordinator.log": "serving\n"}
"""The pages take these for granted in the folder of their reader."""
PROGRAMS = {
    "bagua": f'exec {sys.executable} -P -m bagua.cli.main "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "python3": f'exec {sys.executable} "$@"',
    "python": f'exec {sys.executable} "$@"',
    "sudo": 'exec "$@"',
}
CHECKOUT = re.compile(r"(?<![\w./-])(?=(?:deploy|docs|tests)/)")
"""Before a path of the clone, in which the reader of such a command is."""
SCRIPTS = {
    "autotuning": page_scripts.of_autotuning,
    "checkpoints": page_scripts.of_checkpoints,
    "from-bagua": lambda: "",
    "jobs": page_scripts.of_jobs,
    "profiling": lambda: page_scripts.of_readme(for_ever=True),
    "torch-distributed-programs": page_scripts.of_ddp,
}
"""Pages that take another script than that of the first page."""
TINY = "--seconds 0 --rounds 1 --quiet"
FEW = "--num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2 --batch-size 2"
ONE_TASK = "--tasks digits --share 0.04 --nproc-per-node 1 --quiet"
FEWER = "--waiting 20 --trivial 8 --hosts 8 --times 1 --losses 1 --changes 1 --old 20 --beat-s 2 --settle-s 0"
SHORTER = {
    "-m bagua.examples.charlm --steps 200": "-m bagua.examples.charlm --steps 5",
    "-m bagua.examples.mnist": "-m bagua.examples.mnist --epochs 1 --max-batches 4",
    "--model resnet18 --image-size 64": f"--model resnet18 --image-size 32 {FEW}",
    "-m bagua.examples.moe": "-m bagua.examples.moe --epochs 12",
    "--synthetic 8 --arch resnet18 --epochs 2": "--synthetic 4 --arch resnet_tiny --image-size 32 -b 4 --epochs 1",
    "bench accuracy --output": f"bench accuracy --only local_sgd {ONE_TASK} --seeds 1 --output",
    "bench accuracy --only bytegrad,top_k": f"bench accuracy --only bytegrad,top_k {ONE_TASK} --seeds 1",
    "bench accuracy --only bytegrad --tasks digits": f"bench accuracy --only bytegrad {ONE_TASK}",
    "bench accuracy --only muon": f"bench accuracy --only muon,mu_loco {ONE_TASK} --seeds 1",
    "bench allreduce --nnodes 4": f"bench allreduce --nnodes 3 {TINY}",
    "--sizes 16K,128K,512K --codec none,fp16,minmax8": "--sizes 16K --codec none,fp16,minmax8",
    "study.py --out build/study --record": "study.py --out build/study --models tiny --small --record",
    "study.py --measure": "study.py --models tiny --small --cases tiny@1gbit --seconds 1 --measure",
    "--cases tiny@2mbit,100ms@4 --seconds 30 --rounds 3": "--cases tiny@2mbit,100ms@4 --seconds 1 --rounds 1",
    "chaos --minutes 5 --seed 1": "chaos --minutes 5 --seed 1 --faults 2 --nnodes 2 --nproc-per-node 1",
    "--faults 150 --minutes 82 --nnodes 3": "--faults 1 --minutes 5 --nnodes 2",
    "bench/control_plane.py": f"bench/control_plane.py {FEWER}",
    "--compare --accounts": "--rows queue wide start --compare --accounts",
    "soak/service.py --minutes 60": "soak/service.py --minutes 0.2 --pause 1.5",
    "bench allreduce --nproc-per-node 4": f"bench allreduce --nproc-per-node 2 --sizes 4K {TINY}",
    "bench codec": f"bench codec --sizes 64K {TINY}",
    "bench train --models mlp,resnet": f"bench train --nproc-per-node 1 --models tiny {TINY}",
    "bench train --emulate": f"bench train --models tiny --nproc-per-node 1 {TINY} --emulate",
    "bench train --models resnet": f"bench train --models tiny --nproc-per-node 1 {TINY}",
    "bench network --coordinator HOST:PORT": f"bench network --size 64K {TINY} --coordinator 127.0.0.1:7670",
    "tests/bench/startup.py": "tests/bench/startup.py --rounds 1 --no-cold",
}
"""Commands that train or measure for minutes, and the same with less work."""
LOOK = (
    "(until grep -qs slots top.log; do sleep 0.2; done; while printf q; do sleep 1; done) 2>/dev/null | "
    "TERM=xterm script -qefc 'stty cols 120 rows 50; bagua top' top.log >/dev/null"
)
"""``bagua top`` in a terminal, until it shows the slots of the service; then somebody presses q."""
FOLLOWED_S = 10 * SOON_S
"""A command of a tutorial trains a small model, beside other tests."""


@pytest.fixture(scope="module")
def host():
    """The name of a namespace with the addresses of the pages."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the program ip (Debian: iproute2)")
    name = f"bg{uuid.uuid4().hex[:6]}"

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=SOON_S)

    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        for address in ADDRESSES:
            ip("-n", name, "addr", "add", address, "dev", "lo")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
    yield name
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=SOON_S)


class Reader:
    """Somebody who types what a page says. Services stay; other commands end, with exit code 0."""

    def __init__(self, service, host):
        self.service, self.sandbox = service, service.sandbox
        self.prefix = ("ip", "netns", "exec", host)
        self.running = {}
        self.meanings = {
            "ID": self.newest_job,
            "NODE": self.last_node,
            "/shared": self.shared,
            "FOLDER": self.reports,
            "74e0": self.newest_tuning,
        }
        self.sandbox.programs(**PROGRAMS)
        self.sandbox.env |= {"HOME": str(self.sandbox.runtime), "BAGUA_CACHE_DIR": str(cache_dir())}
        for name in [name for name in self.sandbox.env if name.startswith("BAGUA_STATE") or name == "XDG_STATE_HOME"]:
            del self.sandbox.env[name]
        for name, text in FILES.items():
            (self.sandbox.folder / name).write_text(text)
            (self.sandbox.folder / name).chmod(0o600)

    def read(self, block):
        """Writes the file that a block is, or types its commands."""
        if block.file:
            path = self.sandbox.folder / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
            return
        for line, command in block.commands:
            with _named(f"{block.page}:{line}"):
                self.type(command)

    def type(self, command):
        """One line; returns what was printed."""
        for word, meaning in self.meanings.items():
            if re.search(rf"(?<!\w){word}\b", command):
                command = re.sub(rf"(?<!\w){word}\b", meaning(), command)
        command = CHECKOUT.sub(f"{pages.ROOT}/", command)
        for words, fewer in SHORTER.items():
            command = command.replace(words, fewer)
        if command == "bagua top":
            command = LOOK
        if command.startswith("export "):
            self.sandbox.env |= dict(word.split("=", 1) for word in shlex.split(command)[1:])
            return ""
        if unit := UNIT.match(command):
            self.stop() if unit[1] == "stop" else self.start("bagua coordinator")
            return ""
        if SERVICE.match(command):
            self.start(command)
            return ""
        done = self.sandbox.run(*self.prefix, "sh", "-c", command, deadline=FOLLOWED_S)
        assert done.code == 0, f"{command} ended with {done.code}: {done.text}"
        if "job submit" in command and "--watch" not in command:
            self.sandbox.wait_until(lambda: self.jobs()[0]["state"] not in ("pending", "starting"), 2 * SOON_S)
            assert self.jobs()[0]["state"] in ("running", "succeeded"), self.jobs()[0]
        return done.out

    def start(self, command):
        """Another coordinator takes the place of the one before; its daemons go with that."""
        words = shlex.split(command)[1:]
        name = words[words.index("--name") + 1] if "--name" in words else ""
        if words[0] == "coordinator":
            self.stop()
        self.running[f"{words[0]} {name}"] = self.service.launch(*words, prefix=self.prefix)[0]

    def stop(self):
        """Ends all services, the last first."""
        for process in reversed([*self.running.values()]):
            process.terminate()
            process.wait(SOON_S)
        self.running.clear()

    def jobs(self):
        """All jobs, the newest first."""
        return json.loads(self.type("bagua job list --output json"))["jobs"]

    def newest_job(self):
        if not self.jobs():
            self.type("bagua job submit train.py")
        return str(self.jobs()[0]["job_id"])

    def last_node(self):
        return str(json.loads(self.type("bagua node list --output json"))["nodes"][-1]["node_id"])

    def newest_tuning(self):
        """The id of that of a job, once it has been found."""

        def found():
            return json.loads(self.type("bagua tune list --output json"))["tunings"]

        return str(self.sandbox.wait_until(found, FOLLOWED_S)[0]["id"])

    def reports(self):
        """A folder with the reports of measurements that were made before."""
        folder = self.sandbox.folder / "reports"
        folder.mkdir()
        shutil.copy(self.sandbox.folder / "4.json", folder)
        return str(folder)

    def shared(self):
        """A folder that all nodes see."""
        folder = self.sandbox.folder / "shared"
        folder.mkdir(exist_ok=True)
        return str(folder)


@contextlib.contextmanager
def _named(where):
    """Failures say where the command stands."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This is the command of {where}.")
        raise


@pytest.fixture
def reader(idle_service, host):
    """Somebody with a coordinator and a node ``b`` that is begun with them."""
    made = Reader(idle_service, host)
    try:
        yield made
    finally:
        made.stop()


def played(name):
    return [block for block in pages.of_page(name) if not block.mark and not pages.is_shown_on_readme(block)]


@pytest.mark.full  # contract/test_coordinator_backup.py
def test_operations(reader):
    """A backup comes back; a job that came later does not."""
    reader.start("bagua coordinator")
    never = "bagua job submit --nnodes 7 --placement-timeout 3600 train.py"
    reader.sandbox.run(*reader.prefix, "sh", "-c", never)
    kept = [job["job_id"] for job in reader.jobs()]
    for block in played("operations"):
        if "restore" in block.text:
            reader.sandbox.run(*reader.prefix, "sh", "-c", never)
        reader.read(block)
    assert [job["job_id"] for job in reader.jobs()] == kept and len(kept) == 1


@pytest.mark.full  # their commands have tests of their own
@pytest.mark.parametrize("name", [name for name in pages.PLAYED if name != "operations"])
def test_the_page(reader, name):
    reader.start("bagua coordinator")
    reader.start("bagua daemon --name b --slots 2")
    for block in played(name):
        reader.read(block)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", pages.TRAINED)
def test_the_page_with_a_script_that_trains(reader, name):
    """On two nodes of a service, or by ``bagua run``."""
    reader.start("bagua coordinator")
    for node in ("b", "c"):
        reader.start(f"bagua daemon --name {node} --slots 4")
    files = SCRIPTS.get(name, page_scripts.of_readme)()
    for file, text in (files if isinstance(files, dict) else {"train.py": files}).items():
        (reader.sandbox.folder / file).write_text(text)
    if name == "profiling":  # it is about a job that trains meanwhile
        reader.type("bagua job submit --nnodes 2 train.py")
        reader.sandbox.wait_until(lambda: reader.jobs()[0]["progress"], FOLLOWED_S)
    for block in played(name):
        reader.read(block)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_programs_of_operators(reader, postgres_url):
    """Those of a checkout, on this machine itself, with less work."""
    reader.prefix = ()
    plain, compared, operator, soak = pages.run_by("test_the_programs_of_operators", "docs/operations.md")
    for command in (plain, compared, soak):
        reader.type(command.replace("postgresql://postgres@127.0.0.1/bench", postgres_url))
    if reason := kubernetes.missing() or kubelet.missing():
        pytest.skip(f"all but {operator!r} ran: {reason}")
    folder = Path(str(kubernetes.program("kube-apiserver"))).parent
    reader.type(operator.replace("/opt/kubernetes/bin", str(folder)))


@pytest.mark.full
def test_files_reach_the_second_host(reader):
    """Over an sshd at the second host's address, whose sessions begin in a folder of the test."""
    [command] = pages.run_by("test_files_reach_the_second_host", "docs/tutorials/two-hosts.md")
    folder = reader.sandbox.folder
    second, made = folder / "second", folder / "sshd"
    second.mkdir()
    made.mkdir()
    files = {"Subsystem": "sftp internal-sftp", "ForceCommand": f"internal-sftp -d {second}"}
    server = Sshd(made, ADDRESSES[1].split("/")[0], 22, reader.prefix, **files)
    try:
        reader.sandbox.programs(scp=f'exec {shutil.which("scp")} -F {made / "ssh"} "$@"')
        (folder / "token").write_text("secret")
        reader.type("bagua certs certs/ --host 10.0.0.1")
        reader.type(command)
    finally:
        server.close()
    copied = {str(path.relative_to(second)) for path in second.rglob("*")}
    assert copied == {
        "token",
        *(str(path.relative_to(folder)) for path in [folder / "certs", *(folder / "certs").rglob("*")]),
    }
    assert (second / "token").read_text() == "secret"


@pytest.mark.full
def test_a_coordinator_with_a_provider(reader):
    """It starts, and asks the provider when a token of it comes: ``integration/coordinator/test_coordinator_oidc.py``
    has one that answers."""
    [command] = pages.run_by("test_a_coordinator_with_a_provider", "docs/security.md")
    reader.start(command)
    assert reader.jobs() == [], "the account of the state folder is as good as ever"
    refused = reader.sandbox.run(*reader.prefix, "sh", "-c", "BAGUA_TOKEN=a.b.c bagua job list", deadline=FOLLOWED_S)
    assert refused.code and "token" in refused.err, refused.text


@pytest.fixture
def reader_in_the_open(core, host):
    """One whose folder other users may enter, on a host that has the user ann."""
    if reason := other_users.reason_to_skip():
        pytest.skip(reason)
    from tests.e2e.conftest import Service, sandbox_in

    files = Path("/etc/netns") / host  # `ip netns exec` shows them below /etc
    files.mkdir(parents=True)
    for name, line in {"passwd": f"ann:x:{ANN}:{ANN}::/:/bin/sh", "group": f"ann:x:{ANN}:"}.items():
        (files / name).write_text(f"{Path('/etc', name).read_text()}{line}\n")
    folder = Path(tempfile.mkdtemp(prefix="bgo-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        with sandbox_in(folder) as sandbox:
            made = Reader(Service(sandbox), host)
            yield made
            made.stop()
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(files)


@pytest.mark.full
def test_jobs_run_as_the_user_of_their_account(reader_in_the_open):
    reader = reader_in_the_open
    create, daemon, *submits = pages.run_by("test_jobs_run_as_the_user_of_their_account", "docs/security.md")
    reader.start("bagua coordinator")
    reader.type("bagua token create host-7 --role node --out host-7.token")
    reader.type(create)
    reader.sandbox.env["BAGUA_RANK_DIR"] = str(reader.sandbox.folder / "ranks")
    reader.sandbox.script("train.py", "import os; print('user', os.getuid())").chmod(0o644)
    outside = reader.prefix
    reader.prefix += tuple(other_users.way(Path(tempfile.mkdtemp(dir=reader.sandbox.runtime))))
    reader.start(daemon)
    reader.prefix = outside
    for command in submits:
        reader.type(command)
        job = reader.newest_job()
        reader.sandbox.wait_until(lambda: reader.jobs()[0]["state"] in ("succeeded", "failed"), 2 * SOON_S)
        assert f"user {ANN}" in reader.type(f"bagua job logs {job}"), reader.jobs()


@pytest.fixture
def database(host):
    """A PostgreSQL on the host of the pages, with the names that docs/operations.md gives to it and to the service."""
    bin_dir, become = binaries(), as_postgres()
    if bin_dir is None or become is None:
        pytest.skip("PostgreSQL: no binaries, or no user postgres")
    names = Path("/etc/netns") / host / "hosts"  # `ip netns exec` shows it as /etc/hosts
    names.parent.mkdir(parents=True)
    names.write_text("127.0.0.1 localhost\n10.0.0.1 db\n10.0.0.1 coordinator.example\n10.0.0.2 coordinator.example\n")
    folder = Path(tempfile.mkdtemp(prefix="bagua-pg-", dir="/tmp"))
    shutil.chown(folder, "postgres")

    def run(*words):
        command = ["ip", "netns", "exec", host, *become, *map(str, words)]
        done = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=2 * SOON_S)
        assert done.returncode == 0, command

    control, data = bin_dir / "pg_ctl", folder / "data"
    try:
        run(bin_dir / "initdb", "-D", data, "-U", "bagua", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale", "C")
        with (data / "pg_hba.conf").open("a") as access:
            access.write("host all all 10.0.0.0/24 trust\n")
        options = f"-c listen_addresses=10.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        run(control, "-D", data, "-l", folder / "log", "-o", options, "-w", "start")
        run(bin_dir / "createdb", "-h", folder, "-U", "bagua", "bagua")
        yield
    finally:
        subprocess.run(
            ["ip", "netns", "exec", host, *become, control, "-D", data, "-m", "immediate", "stop"],
            cwd="/",
            capture_output=True,
            timeout=SOON_S,
        )
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(names.parent)


@pytest.mark.full
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_two_coordinators(reader, database, fault):
    """As the page starts them. The first one is lost, and jobs are still taken by the name that leads to both."""
    pytest.importorskip("psycopg", reason="PostgreSQL: the package psycopg is not installed")
    *coordinators, daemon = pages.run_by("test_two_coordinators", "docs/operations.md")
    names = ("10.0.0.1", "10.0.0.2", "coordinator.example")
    reader.type(f"bagua certs certs/ {' '.join(f'--host {name}' for name in names)}")
    first, second = (reader.sandbox.runtime / name for name in ("first", "second"))
    for state, command in zip((first, second), coordinators, strict=True):
        reader.sandbox.env["BAGUA_STATE_DIR"] = str(state)
        if state == second:
            second.mkdir(mode=0o700)
            shutil.copy(first / "token", second)
        reader.running[state.name] = reader.service.launch(*shlex.split(command)[1:], prefix=reader.prefix)[0]
    shutil.copy(first / "token", reader.sandbox.folder)
    reader.type("ip addr replace 10.0.0.3/24 dev lo")
    reader.sandbox.env["BAGUA_STATE_DIR"] = str(reader.sandbox.runtime / "node")
    reader.start(daemon)
    reader.sandbox.env |= {
        "BAGUA_COORDINATOR": "coordinator.example:7670",
        "BAGUA_TLS": "certs/",
        "BAGUA_TOKEN_FILE": "token",
    }
    reader.type("bagua job submit --watch train.py")
    lost = reader.running.pop("first")
    try:
        lost.send_signal(fault)
        reader.type("bagua job submit --watch train.py")
        assert [job["state"] for job in reader.jobs()] == ["succeeded"] * 2
    finally:
        lost.kill()
        lost.wait(SOON_S)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in pages.FOLLOWED if played(name) and name != "tutorials/notebook"])
def test_a_page_is_followed(reader, name):
    """From its first line to its last one."""
    for block in played(name):
        reader.read(block)


@pytest.mark.full
@pytest.mark.parametrize("page", ["docs/tutorials/algorithm.md", "algorithms/README.md"])
def test_an_algorithm_is_checked_as_ours_are(sandbox, page):
    """That which a reader has written, and an example. Of the whole suite the file that is about algorithms."""
    for block in pages.of_path(pages.ROOT / page):
        if block.file == "signs.py":
            sandbox.script(block.file, block.text)
    (sandbox.folder / "my").mkdir()
    sandbox.script("my/module.py", "from bagua.examples.own_algorithm import NormalisedMean as MyAlgorithm\n")
    sandbox.programs(pytest=f'exec {sys.executable} -m pytest "$@"')
    sandbox.env |= {"PYTEST_ADDOPTS": "-q -n 0 -p no:cacheprovider"}
    suite = f"{pages.ROOT}/tests/contract/test_algorithms.py"
    for command in pages.run_by("test_an_algorithm_is_checked_as_ours_are", page):
        typed = command.replace("PATH_OF_THE_CLONE/tests/contract/test_algorithms.py", suite)
        done = sandbox.run("sh", "-c", typed.replace("tests/contract ", f"{suite} "), deadline=FOLLOWED_S)
        assert done.code == 0 and " passed" in done.out, done.text


# Over Unix sockets: a port that is free when the client chooses it may be taken when the kernel starts.
EXECUTE = """
    import sys

    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(sys.argv[1], as_version=4)
    manager = AsyncKernelManager(kernel_name="python3", transport="ipc")
    NotebookClient(notebook, km=manager, startup_timeout=600).execute()
    nbformat.write(notebook, sys.argv[1])
"""


def kinds(cell):
    """The kinds of a cell's outputs, one after the other. A line may come in several pieces."""
    return [kind for kind, _ in itertools.groupby(one.output_type for one in cell.outputs)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["notebook.ipynb", "tutorials/notebook"])
def test_the_notebooks(sandbox, name):
    """In a real kernel: no cell fails, and the outputs are those that are shown, or told of in words."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    target = sandbox.folder / "notebook.ipynb"
    if tutorial := name == "tutorials/notebook":
        cells = [block.text for block in pages.of_page(name) if block.file == "cell"]
        shown = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    else:
        shown = nbformat.read(pages.DOCS / name, as_version=4)
    nbformat.write(shown, target)
    environment = {"PYTHONPATH": "", "JUPYTER_RUNTIME_DIR": str(sandbox.runtime)}
    script = sandbox.script("execute.py", EXECUTE)
    done = sandbox.run(sys.executable, script, target, env=environment, deadline=FOLLOWED_S)
    assert done.code == 0, done.text
    executed = nbformat.read(target, as_version=4)
    if tutorial:
        assert "rank 1 does not like this" in executed.cells[-1].outputs[-1].text
    else:
        pairs = [pair for pair in zip(executed.cells, shown.cells, strict=True) if pair[0].cell_type == "code"]
        assert [kinds(now) for now, _ in pairs] == [kinds(before) for _, before in pairs]
        assert "rank 0 of 1" in executed.cells[-2].outputs[0].text
    sandbox.assert_all_gone(SOON_S)


def test_shorter_commands_are_those_of_pages():
    text = "".join(path.read_text() for path in pages.all_pages())
    assert [words for words in SHORTER if words not in text] == []
