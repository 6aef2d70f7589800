"""``bagua doctor`` on this machine, on a machine without a compiler, and with a port in use."""

import json
import socket

import pytest


def test_this_machine_is_fit(sandbox):
    done = sandbox.bagua("doctor")
    assert done.code == 0, done.text
    for what in ("compiler", "ninja", "torch", "GPU", "/dev/shm", "locked memory", "cores", "network"):
        assert what in done.out
    assert "GB/s on one core" in done.out  # what encryption between hosts costs
    assert "This machine is fit." in done.out
    document = json.loads(sandbox.bagua("doctor", "--output", "json").out)
    assert document["fit"] is True
    assert {check["status"] for check in document["checks"]} <= {"ok", "warn"}
    assert all(check["fix"] for check in document["checks"] if check["status"] != "ok")


def test_no_compiler(sandbox):
    done = sandbox.bagua("doctor", "--output", "json", env={"CXX": "no-such-compiler"})
    assert done.code == 1
    found = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert found["C++ compiler"]["status"] == "fail"
    assert "apt-get install g++" in found["C++ compiler"]["fix"]


def test_folder_that_can_not_be_written(sandbox):
    blocked = sandbox.folder / "file"
    blocked.write_text("")
    done = sandbox.bagua("doctor", env={"BAGUA_STATE_DIR": str(blocked / "state")})
    assert done.code == 1
    assert "BAGUA_STATE_DIR" in done.out


def test_port_in_use(sandbox):
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 7670))
        except OSError:
            pytest.skip("something else uses port 7670")
        taken.listen()
        document = json.loads(sandbox.bagua("doctor", "--output", "json").out)
    found = {check["name"]: check for check in document["checks"]}
    assert found["port"]["status"] == "warn"
    assert document["fit"] is True
