"""The commands of the pages for operators, as they stand there: each page is played on a host of its own, in order.

The host is a network namespace with the addresses and ports that the pages name, and a home folder. ``rig/pages.py``
says which blocks are played. Tutorials and how-to pages are followed in the same way, with the files that they show.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rig import page_scripts, pages
from rig.limits import SOON_S

from bagua.base.paths import cache_dir

if TYPE_CHECKING:
    from tests.e2e.conftest import Sandbox, Service

pytestmark = pytest.mark.root

SERVICE = re.compile(r"bagua (coordinator|daemon|dashboard)(?= -|$)")
UNIT = re.compile(r"systemctl (start|stop) bagua-coordinator$")
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
SCRIPTS: dict[str, Callable[[], str | dict[str, str]]] = {
    "checkpoints": page_scripts.of_checkpoints,
    "jobs": page_scripts.of_jobs,
    "profiling": lambda: page_scripts.of_readme(for_ever=True),
    "torch-distributed-programs": page_scripts.of_ddp,
}
"""Pages that take another script than that of the first page."""
TINY = "--seconds 0 --rounds 1 --quiet"
SHORTER = {
    "-m bagua.examples.charlm --steps 200": "-m bagua.examples.charlm --steps 5",
    "bench allreduce --nproc-per-node 4": f"bench allreduce --nproc-per-node 2 --sizes 4K {TINY}",
    "bench codec": f"bench codec --sizes 64K {TINY}",
    "bench train --models mlp,resnet": f"bench train --nproc-per-node 1 --models tiny {TINY}",
    "bench train --emulate": f"bench train --models tiny --nproc-per-node 1 {TINY} --emulate",
    "bench train --models resnet": f"bench train --models tiny --nproc-per-node 1 {TINY}",
    "bench network --coordinator HOST:PORT": f"bench network --size 64K {TINY} --coordinator 127.0.0.1:7670",
    "tests/bench/startup.py": "tests/bench/startup.py --rounds 1 --no-cold",
}
"""Commands that train or measure for minutes, and the same with less work."""
FOLLOWED_S = 10 * SOON_S
"""A command of a tutorial trains a small model, beside other tests."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """The name of a namespace with the addresses of the pages."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the program ip (Debian: iproute2)")
    name = f"bg{uuid.uuid4().hex[:6]}"

    def ip(*words: str) -> None:
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

    def __init__(self, service: Service, host: str) -> None:
        self.service, self.sandbox = service, service.sandbox
        self.prefix = ("ip", "netns", "exec", host)
        self.running: dict[str, subprocess.Popen[str]] = {}
        home, programs = self.sandbox.runtime, self.sandbox.folder / "bin"
        programs.mkdir()
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        self.sandbox.env |= {"HOME": str(home), "BAGUA_CACHE_DIR": str(cache_dir())}
        self.sandbox.env["PATH"] = f"{programs}:{self.sandbox.env['PATH']}"
        for name in [name for name in self.sandbox.env if name.startswith("BAGUA_STATE") or name == "XDG_STATE_HOME"]:
            del self.sandbox.env[name]
        for name, text in FILES.items():
            (self.sandbox.folder / name).write_text(text)
            (self.sandbox.folder / name).chmod(0o600)

    def read(self, block: pages.Block) -> None:
        """Writes the file that a block is, or types its commands."""
        if block.file:
            path = self.sandbox.folder / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
            return
        for line, command in block.commands:
            with _named(f"{block.page}:{line}"):
                self.type(command)

    def type(self, command: str) -> str:
        """One line; returns what was printed."""
        for word, meaning in (("ID", self.newest_job), ("NODE", self.last_node), ("/shared", self.shared)):
            if re.search(rf"(?<!\w){word}\b", command):
                command = re.sub(rf"(?<!\w){word}\b", meaning(), command)
        command = CHECKOUT.sub(f"{pages.ROOT}/", command)
        for words, fewer in SHORTER.items():
            command = command.replace(words, fewer)
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

    def start(self, command: str) -> None:
        """Another coordinator takes the place of the one before; its daemons go with that."""
        words = shlex.split(command)[1:]
        name = words[words.index("--name") + 1] if "--name" in words else ""
        if words[0] == "coordinator":
            self.stop()
        self.running[f"{words[0]} {name}"] = self.service.launch(*words, prefix=self.prefix)[0]

    def stop(self) -> None:
        """Ends all services, the last first."""
        for process in reversed([*self.running.values()]):
            process.terminate()
            process.wait(SOON_S)
        self.running.clear()

    def jobs(self) -> Any:
        """All jobs, the newest first."""
        return json.loads(self.type("bagua job list --output json"))["jobs"]

    def newest_job(self) -> str:
        if not self.jobs():
            self.type("bagua job submit train.py")
        return str(self.jobs()[0]["job_id"])

    def last_node(self) -> str:
        return str(json.loads(self.type("bagua node list --output json"))["nodes"][-1]["node_id"])

    def shared(self) -> str:
        """A folder that all nodes see."""
        folder = self.sandbox.folder / "shared"
        folder.mkdir(exist_ok=True)
        return str(folder)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Failures say where the command stands."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This is the command of {where}.")
        raise


@pytest.fixture
def reader(idle_service: Service, host: str) -> Iterator[Reader]:
    """Somebody with a coordinator and a node ``b`` that is begun with them."""
    made = Reader(idle_service, host)
    try:
        yield made
    finally:
        made.stop()


def played(name: str) -> list[pages.Block]:
    return [block for block in pages.of_page(name) if not block.mark and not pages.is_shown_on_readme(block)]


def test_operations(reader: Reader) -> None:
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
def test_the_page(reader: Reader, name: str) -> None:
    reader.start("bagua coordinator")
    reader.start("bagua daemon --name b --slots 2")
    for block in played(name):
        reader.read(block)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", pages.TRAINED)
def test_the_page_with_a_script_that_trains(reader: Reader, name: str) -> None:
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
@pytest.mark.parametrize("name", [name for name in pages.FOLLOWED if played(name) and name != "tutorials/notebook"])
def test_a_page_is_followed(reader: Reader, name: str) -> None:
    """From its first line to its last one."""
    for block in played(name):
        reader.read(block)


@pytest.mark.full
def test_the_contract_of_the_algorithm_of_the_tutorial(sandbox: Sandbox) -> None:
    """The algorithm that a reader has written holds what ours hold."""
    for block in played("tutorials/algorithm"):
        if block.file == "signs.py":
            sandbox.script(block.file, block.text)
    suite = Path(__file__).parents[1] / "contract" / "test_algorithms.py"
    words = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", suite, "--algorithm", "signs:Signs")
    done = sandbox.run(sys.executable, *words, env={"PYTHONPATH": str(sandbox.folder)}, deadline=FOLLOWED_S)
    assert done.code == 0 and " passed" in done.out, done.text


@pytest.mark.full
def test_the_cells_of_the_notebook(sandbox: Sandbox) -> None:
    """The tutorial's cells in a real kernel: none fails, and the last one tells what a rank said."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    cells = [block.text for block in pages.of_page("tutorials/notebook") if block.file == "cell"]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    target = sandbox.folder / "notebook.ipynb"
    nbformat.write(made, target)
    words = "import nbclient.cli; nbclient.cli.main()"
    done = sandbox.run(sys.executable, "-c", words, "--inplace", target, env={"PYTHONPATH": ""}, deadline=FOLLOWED_S)
    assert done.code == 0, done.text
    executed = nbformat.read(target, as_version=4)
    assert "rank 1 does not like this" in executed.cells[-1].outputs[-1].text
    sandbox.assert_all_gone(10.0)


def test_a_command_that_fails_is_named(reader: Reader) -> None:
    with pytest.raises(AssertionError) as error:
        reader.read(pages.Block("docs/page.md", 7, "false"))
    assert error.value.__notes__ == ["This is the command of docs/page.md:7."]
