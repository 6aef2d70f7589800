"""The network plugin takes the right interfaces of this machine as devices, and refuses wrong settings."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from bagua import csrc

# As NCCL asks, through the table of version 11. Without a logger warnings go to standard error.
PROBE = """
import ctypes, json, sys
table = (ctypes.c_void_p * 4).in_dll(ctypes.CDLL(sys.argv[1]), "ncclNetPlugin_v11")
def function(place, *types): return ctypes.CFUNCTYPE(ctypes.c_int, *types)(table[place])
context, count, pointer = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p
error = function(1, pointer, ctypes.c_uint64, pointer, pointer, pointer)(ctypes.byref(context), 1, None, None, None)
function(2, pointer)(ctypes.byref(count))
names = []
for device in range(count.value):
    properties = (ctypes.c_char_p * 14)()  # 112 bytes, the name first
    assert function(3, ctypes.c_int, pointer)(device, properties) == 0
    names.append(properties[0].decode())
print(json.dumps({"devices": names, "error": error}))
"""


def look(*prefix, **env):
    """Devices, error and warnings of a plugin with this environment."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "BAGUA_NET_"))}
    command = [*prefix, sys.executable, "-P", "-c", PROBE, str(csrc.net_plugin())]
    done = subprocess.run(command, env={**base, **env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "warnings": done.stderr.splitlines()}


def test_loopback_is_taken_where_it_is_named():
    assert look(NCCL_SOCKET_IFNAME="nosuch,lo") == {"devices": ["lo"], "warnings": [], "error": 0}
    assert "lo" not in look(NCCL_SOCKET_IFNAME="^=lo")["devices"]


def test_interfaces_that_take_nothing():
    """An error that says what there is, so that NCCL takes something else, or says why not."""
    found = look(NCCL_SOCKET_IFNAME="=nosuch,nosuch2")
    assert found["devices"] == [] and found["error"]
    assert any("=nosuch,nosuch2" in text and "lo" in text for text in found["warnings"]), found["warnings"]


def test_settings_that_are_none_are_told():
    found = look(NCCL_SOCKET_IFNAME="lo", NCCL_SOCKET_FAMILY="AF_UNIX", BAGUA_TCP_CONGESTION="fast")
    assert found["devices"] == ["lo"]
    assert any("NCCL_SOCKET_FAMILY" in text and "AF_UNIX" in text for text in found["warnings"])
    assert any("BAGUA_TCP_CONGESTION is 'fast': set it to auto or system" in text for text in found["warnings"])
    bad = {"STREAMS": "-1", "CHUNK": "99999999999999999999", "THREADS": "1.5", "INLINE": "all", "CONNECT_TIMEOUT": "0"}
    found = look(NCCL_SOCKET_IFNAME="lo", **{f"BAGUA_NET_{name}": value for name, value in bad.items()})
    assert found["devices"] == ["lo"]
    for (name, value), warning in zip(sorted(bad.items()), sorted(found["warnings"]), strict=True):
        assert f"BAGUA_NET_{name}" in warning and value in warning


@pytest.mark.root
def test_many_devices():
    """One device for each interface, in a namespace of our own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("interfaces can be made by root with the program ip")
    name = f"baguanet{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=20).returncode:
        pytest.skip("network namespaces can't be made here")

    def ip(*words):
        subprocess.run(["ip", "-n", name, *words], check=True, timeout=20)

    try:
        for index in range(4):
            ip("link", "add", f"veth{index}", "type", "veth", "peer", f"x{index}")
            ip("address", "add", f"10.88.{index}.1/24", "dev", f"veth{index}")
            ip("link", "set", f"veth{index}", "up")
            if index < 3:  # the last one is up, but its cable leads nowhere
                ip("link", "set", f"x{index}", "addrgenmode", "none")
                ip("link", "set", f"x{index}", "up")
        ip("link", "set", "lo", "up")
        inside, working = ("ip", "netns", "exec", name), ["veth0", "veth1", "veth2"]
        deadline = time.monotonic() + 30  # the kernel notes up to a second later that a link works
        while look(*inside)["devices"] != working and time.monotonic() < deadline:
            time.sleep(0.1)
        assert look(*inside)["devices"] == working, "loopback is no device where there are others"
        assert look(*inside, NCCL_SOCKET_IFNAME="^veth0,veth2")["devices"] == ["lo", "veth1"]
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)
