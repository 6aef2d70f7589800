"""``bagua net``, and the plugin in a job's environment. There is no GPU: NCCL's way of finding it is gone by hand."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rig.docs import pages

from bagua.base import net_plugin

DEADLINE_S = 180.0
PRINT_ENVIRONMENT = """
import ctypes, json, os
library = ctypes.CDLL(f"libnccl-net-{os.environ['NCCL_NET_PLUGIN']}.so")
name = ctypes.c_char_p.in_dll(library, "ncclNetPlugin_v8").value.decode()
print("found", json.dumps({"name": name, "wanted": os.environ["NCCL_NET"]}))
"""


def bagua(*arguments, **env):
    command = [sys.executable, "-P", "-m", "bagua.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **env})


def test_paths_devices_and_bad_settings():
    path = Path(json.loads(bagua("net", "path", "--output", "json").stdout)["path"])
    assert path.name == "libnccl-net-bagua.so" and path.is_file()
    name = ctypes.c_char_p.in_dll(ctypes.CDLL(str(path)), "ncclNetPlugin_v11").value
    assert name == net_plugin.NAME.encode(), "NCCL_NET would name another network"
    found = json.loads(bagua("net", "env", "--output", "json", LD_LIBRARY_PATH="/x").stdout)
    assert set(found) == {"NCCL_NET_PLUGIN", "NCCL_NET_PLUGIN_REF_COUNT", "NCCL_NET", "LD_LIBRARY_PATH"}
    assert found["LD_LIBRARY_PATH"].endswith(":/x")
    [device] = json.loads(bagua("net", "show", "--output", "json", NCCL_SOCKET_IFNAME="lo").stdout)["devices"]
    assert (device["device"], device["interface"], device["pci"]) == (0, "lo", None)
    done = bagua("net", "show", NCCL_SOCKET_IFNAME="=nosuch", BAGUA_NET_STREAMS="lots")
    words = ("nosuch", "BAGUA_NET_STREAMS", "error: The plugin finds no")
    assert done.returncode == 1 and all(one in done.stderr for one in words)


def test_environment_for_a_shell():
    """The linker then finds the plugin by its name, as NCCL looks for it."""
    command = 'eval "$("$0" -P -m bagua.cli.main net env)" && exec "$0" -c "$1"'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, PRINT_ENVIRONMENT],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "LD_LIBRARY_PATH": "/some where/lib:/other"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.removeprefix("found "))
    assert found["name"] == found["wanted"] == net_plugin.NAME


@pytest.mark.full
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: emulated networks are namespaces")
def test_the_commands_of_the_page(tmp_path):
    """In one shell, with a script for "…", and messages of one size."""
    [text] = pages.texts_run_by("test_the_commands_of_the_page", "csrc/nccl_net/README.md")
    (tmp_path / "bagua").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m bagua.cli.main "$@"\n')
    (tmp_path / "bagua").chmod(0o755)
    (tmp_path / "script.py").write_text(PRINT_ENVIRONMENT)
    text = text.replace("--enable-bagua-net …", f"--enable-bagua-net {tmp_path / 'script.py'}")
    text = text.replace("bagua bench net", "bagua bench net --sizes 1K --seconds 0 --rounds 1 --quiet")
    done = subprocess.run(
        ["sh", "-euc", text],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NCCL_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert net_plugin.NAME in done.stdout.partition("found ")[2].partition("\n")[0], done.stdout
    assert all(rate in done.stdout for rate in ("1gbit", "10gbit")), done.stdout


def test_a_job_gets_the_plugin_or_ends_with_the_reason(tmp_path):
    (tmp_path / "main.py").write_text(PRINT_ENVIRONMENT)
    done = bagua("run", "--quiet", "--enable-bagua-net", str(tmp_path / "main.py"))
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "found" in line]
    found = json.loads(line.partition("found ")[2])
    assert found["name"] == found["wanted"]
    done = bagua("run", "--quiet", "--env", "BAGUA_ENABLE_NET=perhaps", str(tmp_path / "main.py"))
    assert done.returncode == 1
    assert "BAGUA_ENABLE_NET='perhaps'" in done.stderr and "found" not in done.stdout
