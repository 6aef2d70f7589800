"""``bagua doctor`` on this machine, and on one with troubles."""

import json
import socket
from contextlib import suppress


def test_this_machine_is_fit(sandbox):
    done = sandbox.bagua("doctor")
    assert done.code == 0, done.text
    for what in ("compiler", "ninja", "torch", "GPU", "/dev/shm", "locked memory", "cores", "network"):
        assert what in done.out
    assert "GB/s on one core" in done.out  # what encryption between hosts costs
    assert "This machine is fit." in done.out


def test_a_machine_that_is_not(sandbox):
    """No compiler, a state folder that can't be written, and the port is in use."""
    blocked = sandbox.folder / "file"
    blocked.write_text("")
    env = {"CXX": "no-such-compiler", "BAGUA_STATE_DIR": str(blocked / "state")}
    with socket.socket() as taken:
        with suppress(OSError):  # something else uses it
            taken.bind(("127.0.0.1", 7670))
            taken.listen()
        done = sandbox.bagua("doctor", "--output", "json", env=env)
    document = json.loads(done.out)
    found = {check["name"]: check for check in document["checks"]}
    assert done.code == 1 and document["fit"] is False
    assert found["C++ compiler"]["status"] == "fail" and "apt-get install g++" in found["C++ compiler"]["fix"]
    assert found["port"]["status"] == "warn" and "BAGUA_STATE_DIR" in done.out
    assert all(check["fix"] for check in found.values() if check["status"] != "ok")
