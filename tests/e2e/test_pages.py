"""The commands of the pages for operators, as they stand there: each page is played on a host of its own, in order.

The host is a network namespace with the addresses and ports that the pages name, and a home folder. ``rig/pages.py``
says which blocks are played.
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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from rig import pages
from rig.limits import SOON_S

from bagua.base.paths import cache_dir

if TYPE_CHECKING:
    from tests.e2e.conftest import Service

pytestmark = pytest.mark.root

SERVICE = re.compile(r"bagua (coordinator|daemon|dashboard)(?= -|$)")
UNIT = re.compile(r"systemctl (start|stop) bagua-coordinator$")
ADDRESSES = ("10.0.0.1/24", "10.0.0.2/24")
FILES = {"train.py": "print('trained')\n", "hf.token": "a secret\n", "coordinator.log": "serving\n"}
"""The pages take these for granted in the folder of their reader."""


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
        (programs / "bagua").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m bagua.cli.main "$@"\n')
        (programs / "bagua").chmod(0o755)
        self.sandbox.env |= {"HOME": str(home), "BAGUA_CACHE_DIR": str(cache_dir())}
        self.sandbox.env["PATH"] = f"{programs}:{self.sandbox.env['PATH']}"
        for name in [name for name in self.sandbox.env if name.startswith("BAGUA_STATE") or name == "XDG_STATE_HOME"]:
            del self.sandbox.env[name]
        for name, text in FILES.items():
            (self.sandbox.folder / name).write_text(text)
            (self.sandbox.folder / name).chmod(0o600)

    def read(self, block: pages.Block) -> None:
        """Does what a block says."""
        for line, command in block.commands:
            with _named(f"docs/{block.page}.md:{line}"):
                self.type(command)

    def type(self, command: str) -> str:
        """One line; returns what was printed."""
        for word, meaning in (("ID", self.newest_job), ("NODE", self.last_node)):
            if re.search(rf"\b{word}\b", command):
                command = re.sub(rf"\b{word}\b", meaning(), command)
        if unit := UNIT.match(command):
            self.stop() if unit[1] == "stop" else self.start("bagua coordinator")
            return ""
        if SERVICE.match(command):
            self.start(command)
            return ""
        done = self.sandbox.run(*self.prefix, "sh", "-c", command)
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
    return [block for block in pages.of_page(name) if not block.mark]


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


def test_a_command_that_fails_is_named(reader: Reader) -> None:
    with pytest.raises(AssertionError) as error:
        reader.read(pages.Block("page", 7, "false"))
    assert error.value.__notes__ == ["This is the command of docs/page.md:7."]
